"""Tiny learners of every architecture, edited by a tuning method, and batches for them."""

from __future__ import annotations

import hashlib

import torch

from lmtool.config.registry import Choice, build, lookup
from lmtool.models.encoder_decoder import shift_right
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.types import Batch, Packed, Target

SIZES = {
    "vocab_size": 40, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "max_positions": 32,
    "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
FAMILIES = ("bert", "gpt", "t5", "bart", "albert")
LENGTHS = (5, 3, 12, 7)
TASK = ClassificationConfig(text=("text",), label="label", labels=("no", "yes"))
NEW = frozenset({f"heads.{TASK.name}"})


def model_config(family, **fields):
    return lookup("model", family).config(**{**SIZES, **fields})


def first_conflict(tuning, model, task):
    """The first conflict of a tuning method with a model and a task; None if there is none."""
    return next(iter((*tuning.conflicts(), *tuning.conflicts_with_model(model, task))), None)


def tuning_config(**fields):
    return Choice("tuning").validate(fields)


def tuned(model, tuning, new=NEW, task=TASK):
    """A learner of a task as `assemble` builds it, on the default device.

    Args:
        tuning: Fields of the tuning method; None for no method.
    """
    backbone, method = build(model, 0), None
    if tuning is not None:
        method = build(tuning_config(**tuning))
        method.prepare(backbone)
    learner = build(task).learner(backbone, None, 0)
    if method is not None:
        learner.tune(method, new)
    return learner


def side(lengths=LENGTHS, seed=1):
    tokens = torch.randint(5, 40, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Packed(tokens, lengths, {"segment": torch.zeros_like(tokens)})


def batch_for(learner, keep=None):
    """A batch of four texts, or of the texts in keep."""
    numbers = list(range(len(LENGTHS))) if keep is None else keep
    inputs = side()
    pieces = inputs.tokens.split(list(LENGTHS))
    tokens, lengths = torch.cat([pieces[number] for number in numbers]), tuple(LENGTHS[number] for number in numbers)
    inputs = Packed(tokens, lengths, {"segment": torch.zeros_like(tokens)})
    two_stacks = learner.backbone.config.architecture == "encoder_decoder"
    outputs = shift_right(inputs, 2) if two_stacks else None
    labels = torch.tensor([number % 2 for number in numbers])
    examples = torch.tensor(numbers)
    return Batch(inputs, {learner.term: Target(labels)}, examples, examples * 0, outputs)


@torch.no_grad()
def outputs_of(learner, batch=None):
    learner.eval()
    return learner.outputs(batch or batch_for(learner), 0)


def train(learner, steps=2, lr=0.01):
    """A few steps of AdamW over the learner's parameter groups. Returns the optimizer."""
    learner.train()
    groups = learner.parameter_groups()
    optimizer = torch.optim.AdamW([tensor for group in groups for _, tensor in group.parameters], lr)
    batch = batch_for(learner)
    for step in range(1, steps + 1):
        learner.on_step(step)
        learner(batch, step).sums[learner.term].backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def hashes(learner):
    """A hash of each parameter's bits."""
    return {
        name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in learner.named_parameters()
    }
