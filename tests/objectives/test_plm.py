"""Permutation language modeling: masks filled by the query stream, and windows along lanes with memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from objective_fixtures import backbone, gradients, rows_of, sentences, split, store, tokenizer

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.base import Inference
from lmtool.nn.cache import carried_tensors, load_carried
from lmtool.objectives.configs import PlmConfig
from lmtool.training.precision import FP32_CPU

WORDS = tokenizer()
STORE = store(WORDS, sentences(12))


def learner(reuse=0, **fields):
    fields = {"dropout": 0.0, **fields}
    return build(PlmConfig(reuse=reuse), backbone("xlnet", **fields), WORDS, 3)


def learner_with_memory():
    return learner(6, memory_length=10)


def steps_of(built, count, **sizes):
    loader = PackedLoader(built.examples(split(STORE), 16), 3, **{"batch_examples": 4, **sizes})
    return [step.batches for step, _ in zip(loader.steps(), range(count), strict=False)]


def test_masks_are_filled_and_shown_in_samples():
    built = learner().eval()
    rows = Rows([0], {"text": ["the old [MASK] sat near a [MASK]"]}, None, [("text", 1)])
    (record,) = built.responder().answers(rows, Inference(4, 64, FP32_CPU)).records
    assert len(record["masks"]) == 2 and all(len(mask["guesses"]) == 5 for mask in record["masks"])
    batch = rows_of(built.examples(split(STORE), 16), 3)
    samples = built.samples(batch, 2)
    labels = batch.targets["plm"].labels[batch.inputs.documents[batch.targets["plm"].at] < 2]
    assert [mask["truth"] for sample in samples for mask in sample["masked"]] == WORDS.pieces(labels.tolist())
    assert {mask["shown"] for sample in samples for mask in sample["masked"]} == {"[MASK]"}


def test_windows_of_a_lane_advance_by_the_reused_tokens():
    built = learner_with_memory()
    batches = [batch for (batch,) in steps_of(built, 4)]
    stream = built.examples(split(STORE), 16).stream
    texts = [[text[:-2].numpy() for text in batch.inputs.tokens.split(batch.inputs.lengths)] for batch in batches]
    for lane in range(4):
        places = [len(stream) * lane // 4 + 6 * number for number in range(4)]
        for place, own in zip(places, texts, strict=True):
            assert np.array_equal(own[lane], stream.read(np.array([place]), np.array([14])))
    assert [batch.lanes.read for batch in batches] == [(0,) * 4, (6,) * 4, (12,) * 4, (18,) * 4]


def test_memory_contains_layer_inputs_of_reused_tokens():
    """The memory contains the states of the last ten reused tokens; those of the first layer are token vectors."""
    built = learner_with_memory()
    batches = [batch for (batch,) in steps_of(built, 3)]
    for batch in batches[:2]:
        built(batch, 1)
    (held,) = carried_tensors(built).values()
    assert held.shape == (4, 2, 10, 32) and not held.requires_grad
    first = [
        torch.stack([text[:6] for text in batch.inputs.tokens.split(batch.inputs.lengths)]) for batch in batches[:2]
    ]
    vectors = built.backbone.embed.token.weight[torch.cat(first, 1)[:, -10:]]
    torch.testing.assert_close(held[:, 0], vectors)
    _, with_state = gradients(built, [batches[2]])
    load_carried(built, {name: tensor * 0 for name, tensor in carried_tensors(built).items()}, torch.device("cpu"))
    _, without = gradients(built, [batches[2]])
    assert any(not torch.equal(with_state[name], without[name]) for name in with_state)


def test_micro_batches_have_the_same_loss():
    sums = []
    for sizes in ({}, {"micro_batch_tokens": 32}):
        built = learner_with_memory()
        with torch.no_grad():
            sums.append(
                [sum(float(built(batch, 1).sums["plm"]) for batch in parts) for parts in steps_of(built, 3, **sizes)]
            )
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_separate_documents_carry_no_state():
    built = learner_with_memory()
    windows = PackedLoader(built.examples(split(STORE, "separate"), 16), 3, batch_examples=4)
    built(next(iter(windows.steps())).batches[0], 1)
    assert carried_tensors(built) == {}


def test_reuse_that_covers_the_window_is_refused():
    with pytest.raises(UserError, match="objective.reuse=14 covers all of the 14 tokens"):
        learner(14, memory_length=10).examples(split(STORE), 16).in_lanes(2)
