"""Entity scores of tags: computed by hand, by a plain loop, and by seqeval where it is installed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lmtool.learners.metrics.spans import EntityTags, total


def scored(gold, predicted, labels=None):
    labels = labels or sorted({tag for sentence in gold + predicted for tag in sentence})
    number = {label: index for index, label in enumerate(labels)}
    sides = [np.array([number[tag] for tags in side for tag in tags], dtype=np.int64) for side in (gold, predicted)]
    return EntityTags(labels).score(*sides, np.array([len(tags) for tags in gold]))


def test_entity_scores_match_hand_computed_values():
    """Gold: PER 0-1, LOC 3, PER 4 (B ends the previous entity), LOC 6 (I after O begins one), ORG 7 (I after another
    type), PER 8 (a new sentence). Predicted: PER 0-1 correct; LOC 3-4 too long; ORG 6-7 of one type; PER 8 correct.
    2 correct, 6 gold, 4 predicted: precision 1/2, recall 1/3, F1 2*2/(6+4) = 2/5."""
    gold = [["B-PER", "I-PER", "O", "B-LOC", "B-PER", "O", "I-LOC", "I-ORG"], ["I-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O", "B-ORG", "I-ORG"], ["B-PER"]]
    scores = scored(gold, predicted)
    counts = {kind: (score.gold, score.predicted, score.right) for kind, score in scores.items()}
    assert counts == {"PER": (3, 2, 2), "LOC": (2, 1, 0), "ORG": (1, 1, 0)}
    every = total(scores)
    assert (every.precision, every.recall, every.f1) == pytest.approx((0.5, 1 / 3, 0.4), abs=1e-12)
    assert scores["PER"].recall == pytest.approx(2 / 3) and scores["LOC"].f1 == 0.0


def test_scores_without_entities_are_zero():
    assert total(scored([["O", "O"]], [["O", "O"]])).f1 == 0.0
    assert total(scored([["B-X"], []], [["O"], []])).recall == 0.0


def entities_of(sentences):
    """The entities of sentences, by a loop over the tags."""
    entities, at = set(), 0
    for tags in sentences:
        current, previous = None, "O"
        for tag in [*tags, "O"]:
            prefix, _, kind = tag.partition("-")
            last_prefix, _, last_kind = previous.partition("-")
            begins = prefix in ("B", "S") or (
                prefix in ("I", "E") and (last_prefix in ("O", "E", "S") or kind != last_kind)
            )
            if current is not None and (tag == "O" or begins):
                entities.add((current, at, last_kind))
                current = None
            if begins:
                current = at
            previous, at = tag, at + 1
    return entities


def irregular_tags(seed):
    chance = random.Random(seed)
    kinds = ["PER", "LOC", "x-y"][: chance.randint(1, 3)]
    labels = ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in ("BI" if seed % 2 else "BIES"))]
    chance.shuffle(labels)
    gold = [[chance.choice(labels) for _ in range(chance.randint(0, 9))] for _ in range(chance.randint(1, 12))]
    gold.append(["O"])
    guess = [[tag if chance.random() < 0.6 else chance.choice(labels) for tag in tags] for tags in gold]
    return labels, gold, guess


def test_irregular_tags_match_a_plain_loop():
    for seed in range(60):
        labels, gold, guess = irregular_tags(seed)
        scores = scored(gold, guess, labels)
        every, gold_entities, predicted_entities = total(scores), entities_of(gold), entities_of(guess)
        both = gold_entities & predicted_entities
        assert (every.gold, every.predicted, every.right) == (len(gold_entities), len(predicted_entities), len(both))
        for kind, score in scores.items():
            assert score.right == sum(entity[2] == kind for entity in both)


def test_irregular_tags_match_seqeval():
    reference = pytest.importorskip("seqeval.metrics.sequence_labeling")
    for seed in range(60):
        labels, gold, guess = irregular_tags(seed)
        ours = total(scored(gold, guess, labels))
        theirs = reference.precision_recall_fscore_support(gold, guess, average="micro", zero_division=0)[:3]
        assert (ours.precision, ours.recall, ours.f1) == pytest.approx(theirs, abs=1e-9)
