"""Every objective on a CUDA device: losses equal those of a CPU, and steps do not synchronize. Run by `make gpu`."""

from __future__ import annotations

import objective_fixtures
import pytest
import torch
from objective_fixtures import backbone, rows_of, split, store
from test_learners import OBJECTIVES

from lmtool.config.registry import build
from lmtool.training.configs import AdamWConfig
from lmtool.training.engine import Plain
from lmtool.training.health import Health
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress
from lmtool.training.step import apply_gradients, gradients
from lmtool.types import Step

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def tokenizers():
    return objective_fixtures.tokenizers()


def learner_and_batch(name, tokenizers, **sizes):
    family, config, documents = OBJECTIVES[name]
    learner = build(config, backbone(family, **sizes), tokenizers[family], 3)
    return learner, rows_of(learner.examples(split(store(tokenizers[family]), documents), 32), 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_match_cpu(name, precision, tokenizers):
    """Without dropout, which differs between devices; in bf16 with the variable-length kernels."""
    losses, norms = [], []
    for device, kind in ((torch.device("cpu"), "fp32"), (DEVICE, precision)):
        learner, batch = learner_and_batch(name, tokenizers)
        learner.to(device).eval()
        with Precision(kind, device, "").autocast():
            output = learner(batch.to(device), 1)
        sum(output.sums.values()).backward()
        losses.append([float(value.detach()) for value in output.sums.values()])
        norms.append(
            float(torch.nn.utils.get_total_norm([grad for p in learner.parameters() if (grad := p.grad) is not None]))
        )
    near = {"rel": 1e-4} if precision == "fp32" else {"rel": 3e-2}
    assert losses[1] == pytest.approx(losses[0], **near)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3 if precision == "fp32" else 0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_step_does_not_synchronize(name, dropout, tokenizers):
    rate = "dropout" if OBJECTIVES[name][0] == "lstm" else "attention_dropout"
    learner, batch = learner_and_batch(name, tokenizers, **{rate: dropout})
    learner.to(DEVICE).train()
    optimizer = build(AdamWConfig(), learner.parameter_groups())
    precision = Precision("bf16", DEVICE, "")
    health = Health(precision, 1.0, Progress())

    def step(number):
        outcome = gradients(Plain(learner), Step([batch], {}, 0.0), number, 0, precision)
        norm = apply_gradients(optimizer, None, list(learner.parameters()), 1.0)
        health.watch(number, None, outcome.loss, norm, scaled=False)
        return outcome.loss

    first = step(1)  # loads kernels and allocates pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (2, 3, 4):
            last = step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(last)) and float(last) != float(first)
