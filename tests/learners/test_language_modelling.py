"""Perplexity against transformers' GPT2LMHeadModel with the same random weights, over the windows of training and over
overlapping windows (stride)."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.store import TokenStore
from lmtool.data.tokenizing import TextSize
from lmtool.errors import UserError
from lmtool.learners.evaluation import evaluate
from lmtool.learners.metrics import smaller_is_better
from lmtool.objectives.clm import CausalLanguageModel
from lmtool.objectives.configs import ClmConfig
from tests.models.parity import CASES, loaded

END, LENGTH = 0, 12
SIZES = (30, 1, 45, 5, 12, 11)
WORDS, BYTES = 70, 400


@cache
def pair():
    both = loaded(CASES["gpt"].pair())
    both.theirs.eval()
    return both


def text(documents="joined", stride=None, **metadata):
    draws = np.random.default_rng(0)
    offsets = np.cumsum([0, *SIZES])
    tokens = draws.integers(1, 97, offsets[-1]).astype(np.uint16)
    known = {"tokens": len(tokens), "words": WORDS, "bytes": BYTES, **metadata}
    store = TokenStore(tokens, offsets, offsets, np.arange(len(offsets)), known, Path())
    return SplitData("validation", store, documents, stride=stride)


def scored(data):
    tokenizer = SimpleNamespace(role={"eos": END}.get, vocab_size=97, special_ids=frozenset({END}))
    learner = CausalLanguageModel(ClmConfig(), pair().ours.backbone, tokenizer, 0)
    examples = learner.examples(data, LENGTH)
    loader = PackedLoader(examples, 0, None, 50, shuffle=False)
    evaluation = evaluate(learner, learner.scorer(data, examples, {}), loader.epoch_batches())
    return evaluation, examples


def reference(data, stride):
    """(loss, whether the target is an end token) of each target, window by window, as in the transformers guide."""
    ids = [[*data.text.document(number).tolist(), END] for number in range(len(data.text))]
    runs = ids if data.documents == "separate" else [[token for document in ids for token in document]]
    losses = []
    for run in runs:
        known = 1
        for begin in range(0, len(run), stride):
            window = torch.tensor(run[begin : begin + LENGTH])
            with torch.no_grad():
                log_probs = pair().theirs(window[None]).logits[0].log_softmax(-1)
            losses += [
                (-float(log_probs[at - begin - 1, run[at]]), run[at] == END) for at in range(known, begin + len(window))
            ]
            known = begin + len(window)
            if known == len(run):
                break
    return losses


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("stride", [None, 5, 1])
def test_losses_of_all_tokens_match_transformers(documents, stride):
    data = text(documents, stride)
    evaluation, examples = scored(data)
    expected = reference(data, stride or LENGTH - 1)
    starts = len(SIZES) if documents == "separate" else 1
    assert evaluation.terms["clm"].count == len(expected) == sum(SIZES) + len(SIZES) - starts
    loss = np.mean([value for value, _ in expected])
    assert evaluation.loss == pytest.approx(loss, abs=1e-5)
    of_text = np.mean([value for value, end in expected if not end]) * sum(SIZES)
    assert evaluation.scores == pytest.approx(
        {
            "perplexity": math.exp(loss),
            "word_perplexity": math.exp(of_text / WORDS),
            "bits_per_byte": of_text / BYTES / math.log(2),
        },
        rel=1e-4,
    )
    assert evaluation.metrics()["perplexity"] == evaluation.scores["perplexity"]
    rows = examples.plan(0).rows
    assert examples.metadata()["predicted_fraction"] == pytest.approx(len(expected) / rows["length"].sum())


def test_stride_leaves_the_expected_context():
    """After the first window, every target has at least max_length - stride tokens of context."""
    examples = scored(text(stride=5))[1]
    known = examples.plan(0).rows["known"]
    assert known[0] == 1 and len(known) > 5 and (known[1:] == LENGTH - 5).all()


def test_stride_of_max_length_is_refused():
    with pytest.raises(UserError, match="stride=12 is too long"):
        scored(text(stride=LENGTH))


def test_word_scores_need_word_counts_and_unknown_tokens_warn():
    evaluation, _ = scored(text(words=0))
    assert list(evaluation.scores) == ["perplexity"]
    warned, _ = scored(text(unknown_fraction=0.25))
    assert "25.00% of the tokens are unknown" in warned.warnings[0]


def test_text_size_of_a_document_in_parts():
    size = TextSize()
    for part, ends in [("two wor", False), ("ds and", False), (" ", False), ("\nmore", True), ("é", True)]:
        size.add(part, ends)
    assert (size.words, size.bytes) == (5, len("two words and \nmoreé".encode()))


def test_smaller_is_better_depends_on_the_metric_name():
    better = [name for name in ("dev_perplexity", "bits_per_byte", "mlm_loss", "mse") if smaller_is_better(name)]
    assert len(better) == 4 and not any(map(smaller_is_better, ("accuracy", "f1", "exact_match", "word")))
