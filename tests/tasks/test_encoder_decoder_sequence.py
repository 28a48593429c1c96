"""Classification with encoder-decoders: the decoder reads the same text, and the head reads its last state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from task_fixtures import SIZES, TEXTS, examples_of, singles, table, task_config

from lmtool.config.registry import build
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.tasks.loading import load_task
from lmtool.tokenizers.configs import ByteBpeConfig
from lmtool.types import Packed

FAMILIES = {
    "t5": (T5Config(**SIZES), "gpt2"),
    "bart": (BartConfig(**SIZES, activation_dropout=0.2), "roberta"),
    "transformer": (Transformer2017Config(**{**SIZES, "attention_dropout": 0.1}), "roberta"),
}


@pytest.fixture(params=FAMILIES)
def learner_and_data(request, tmp_path):
    config, special_tokens = FAMILIES[request.param]
    table(tmp_path / "train.tsv", ["text", "label"], singles(12, [1, 0]))
    data = load_task(task_config("classification", path=tmp_path), 0, tmp_path / "cache", True)
    tokenizer = build(ByteBpeConfig(minimum_count=1, special_tokens=special_tokens), TEXTS * 3, 290)
    return data.config.learner(build(config, 0), tokenizer, 0), data


def batch_of(examples, numbers):
    return examples.batch(examples.plan(0).rows[np.asarray(numbers)], np.asarray(numbers), 0)


def test_decoder_reads_text_after_start_token(learner_and_data):
    learner, data = learner_and_data
    learner.eval()
    examples = examples_of(learner, data.train)
    batch = batch_of(examples, range(4))
    start = learner.tokenizer.role(learner.backbone.config.start_role)
    inputs, outputs = (side.tokens.split(side.lengths) for side in (batch.inputs, batch.outputs))
    for read, text in zip(outputs, inputs, strict=True):
        assert read.tolist() == [start, *text.tolist()[:-1]]
        assert text[-1] == learner.tokenizer.role("eos")
    assert examples.plan(0).lengths[:4].tolist() == [2 * length for length in batch.inputs.lengths]
    number = 2
    hidden = learner.backbone(
        Packed(inputs[number], (len(inputs[number]),)), None, Packed(outputs[number], (len(inputs[number]),))
    )
    wanted = learner.heads[data.config.name].output(hidden[-1:])
    torch.testing.assert_close(learner.outputs(batch, 0)[number : number + 1], wanted)


def test_packing_keeps_loss_and_gradients_under_dropout(learner_and_data):
    learner, data = learner_and_data
    learner.train()
    examples = examples_of(learner, data.train)

    def step(parts):
        learner.zero_grad()
        total = sum(learner(batch_of(examples, part), 3).sums[data.config.name] for part in parts)
        total.backward()
        return total.item(), {name: parameter.grad.clone() for name, parameter in learner.named_parameters()}

    loss, gradients = step([range(6)])
    single_loss, single = step([[number] for number in range(6)])
    assert single_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(single[name], gradient, rtol=1e-4, atol=2e-6)
    without = learner.eval()(batch_of(examples, range(6)), 3).sums[data.config.name].item()
    assert without != pytest.approx(loss, rel=1e-3)
