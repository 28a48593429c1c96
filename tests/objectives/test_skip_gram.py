"""Skip-gram with negative sampling: against a plain loop over words, and statistics over a million tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.models.pretransformer_configs import WordVectorsConfig
from lmtool.objectives.configs import SkipGramConfig
from lmtool.objectives.skip_gram import SkipGram
from lmtool.random_streams import uniform
from lmtool.tokenizers.configs import WordConfig
from lmtool.types import Batch, Packed, Target
from tests.objectives.objective_fixtures import TEXT, rows_of, split

SEED = 11


@pytest.fixture(scope="module")
def words():
    return build(WordConfig(minimum_count=1), [TEXT + " ."], 64)


def learner_of(words, **fields):
    return SkipGram(
        SkipGramConfig(**fields), build(WordVectorsConfig(vocab_size=40, hidden_size=5), 0), words, SEED
    ).double()


def store_of_ids(documents):
    """A token store of documents that are lists of ids."""
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenStore(
        np.concatenate(documents).astype(np.uint16), offsets, offsets, np.arange(len(documents) + 1), {}, None
    )


def plain_pairs(learner, documents, examples, epoch, counts):
    """The triples (center, context, negatives) of whole documents, word by word. counts: occurrences by word."""
    config, total = learner.config, sum(counts.values())
    noise = {word: count**config.power for word, count in sorted(counts.items())}
    drawn_to = dict(zip(noise, np.cumsum(list(noise.values())) / sum(noise.values()), strict=True))
    stride = 2 + 2 * config.window * config.negatives
    for document, example in zip(documents, examples, strict=True):
        draws = uniform(learner.seed, "sample", epoch, np.array([example]), stride * len(document))[0]
        kept = []
        for place, word in enumerate(document):
            frequency = counts.get(word, 0) / total
            if word in counts and draws[stride * place] < min(1.0, math.sqrt(config.subsample / frequency)):
                kept.append(place)
        for center, place in enumerate(kept):
            reach = 1 + int(draws[stride * place + 1] * config.window)
            slots = [offset for offset in range(-config.window, config.window + 1) if offset]
            for slot, offset in enumerate(slots):
                context = center + offset
                if abs(offset) <= reach and 0 <= context < len(kept):
                    first = stride * place + 2 + slot * config.negatives
                    negatives = [
                        next(word for word, end in drawn_to.items() if draw < end)
                        for draw in draws[first : first + config.negatives]
                    ]
                    yield document[place], document[kept[context]], negatives


@pytest.mark.parametrize("fields", [{"subsample": 0.02}, {"window": 2, "negatives": 3, "subsample": 1.0, "power": 1.0}])
def test_loss_and_gradients_match_a_plain_loop(words, fields):
    draws = np.random.default_rng(2)
    unknown = words.role("unk")
    documents = [draws.integers(5, 21, size).tolist() for size in (9, 1, 17, 3)]
    documents[2][4] = unknown  # unknown words are removed from the text
    learner = learner_of(words, **fields)
    torch.nn.init.normal_(learner.heads["skip_gram"].output.token.weight)
    torch.nn.init.normal_(learner.backbone.embed.token.weight)
    batch = rows_of(learner.examples(split(store_of_ids(documents)), 32), 4, epoch=3)
    counts: dict[int, int] = {}
    for word in (word for document in documents for word in document if word != unknown):
        counts[word] = counts.get(word, 0) + 1
    pairs = list(plain_pairs(learner, documents, range(4), 3, counts))
    vectors, outputs = learner.backbone.embed.token.weight, learner.heads["skip_gram"].output.token.weight
    plain = torch.zeros((), dtype=torch.float64)
    for word, context, negatives in pairs:
        plain = plain - torch.log(torch.sigmoid(outputs[context] @ vectors[word]))
        for negative in negatives:
            plain = plain - torch.log(torch.sigmoid(-outputs[negative] @ vectors[word]))
    assert len(pairs) > 10
    counted = learner.counts(batch)
    assert counted == {"skip_gram": len(pairs), "negatives": len(pairs) * learner.config.negatives}
    step = learner(batch, 1)
    loss = sum(step.loss_weights[term] * step.sums[term] / counted[term] for term in counted)
    torch.testing.assert_close(loss, plain / len(pairs), rtol=1e-12, atol=0)
    ours = torch.autograd.grad(loss, [vectors, outputs])
    theirs = torch.autograd.grad(plain / len(pairs), [vectors, outputs])
    for own, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)
    scores = learner.score(batch)
    mean = sum(step.loss_weights[term] * scores[term].losses.mean() for term in counted)
    torch.testing.assert_close(mean.double(), loss.detach(), rtol=1e-5, atol=0)


def test_statistics_over_a_million_tokens_match_the_definition(words):
    draws = np.random.default_rng(4)
    fractions = 1 / np.arange(1, 17)
    documents = np.split(draws.choice(np.arange(4, 20), 60_000, p=fractions / fractions.sum()), range(37, 60_000, 53))
    learner = learner_of(words, window=2, negatives=1, subsample=0.01)
    examples = learner.examples(split(store_of_ids(documents)), 64)
    stats = learner.inspector(examples, 64).measure(1_000_000)
    assert not stats.broken()
    kept = stats.statistics["retained words"]
    assert kept.count >= 1_000_000 and 0.2 < kept.measured < 0.9
    for name in (
        "retained special tokens",
        "pairs across documents",
        "pairs outside of the windows",
        "pairs of a word with itself",
    ):
        assert stats.statistics[name].exact and stats.statistics[name].total == 0
    windows = [stats.statistics[f"windows of {reach} on either side"].measured for reach in ("1 word", "2 words")]
    assert np.allclose(windows, 0.5, atol=0.005)
    assert stats.statistics["negatives of rank 2 to 10"].count > 1e6


def test_held_out_text_uses_training_counts(words):
    train, held_out = [[5, 6, 7, 5, 5, 6] * 4], [[8, 9, 5] * 8]
    learner = learner_of(words)
    examples = learner.examples(split(store_of_ids(held_out), name="validation"), 32)
    assert set(np.flatnonzero(examples.counts.noise)) == {5, 8, 9}  # no other words are counted
    learner.examples(split(store_of_ids(train)), 32)
    again = learner_of(words)
    again.load_state_dict(learner.state_dict())
    for known in (learner, again):
        examples = known.examples(split(store_of_ids(held_out), name="validation"), 32)
        assert set(np.flatnonzero(examples.counts.noise)) == {5, 6, 7}


def test_batch_without_pairs_has_zero_loss(words):
    """A text of a single word has no pairs."""
    learner = learner_of(words)
    none = torch.zeros(0, dtype=torch.int64)
    targets = {term: Target(none, none) for term in ("skip_gram", "negatives")}
    batch = Batch(Packed(torch.tensor([5]), (1,)), targets, torch.arange(1), torch.zeros(1))
    assert {term: len(scores.losses) for term, scores in learner.score(batch).items()} == dict.fromkeys(targets, 0)
    assert all(float(total) == 0 for total in learner(batch, 1).sums.values())


def test_text_without_known_words_is_refused(words):
    with pytest.raises(UserError, match="no word of the vocabulary"):
        learner_of(words).examples(split(store_of_ids([[words.role("unk")] * 9])), 32)


def test_neighbors_are_ranked_by_cosine_similarity(words):
    learner = learner_of(words).float()
    with torch.no_grad():
        table = learner.backbone.embed.token.weight.normal_()
        cat, dogs = int(words.encode("cat")[0]), int(words.encode("dogs")[0])
        table[dogs] = 2 * table[cat]
    (record,) = learner.responder().answers(Rows.of_texts(text=["Cat"]), None).records
    assert record["neighbours"][0][0] == "dogs" and record["neighbours"][0][1] == pytest.approx(1)
    assert "cat" not in [word for word, _ in record["neighbours"]]
    with pytest.raises(UserError, match="no word of the vocabulary"):
        list(learner.responder().answers(Rows.of_texts(text=["zzz"]), None).records)
