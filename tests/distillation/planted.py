"""A teacher with a known circuit, after Geiger et al. 2022. A text is `cls a b x y`; its label says whether two
predicates are equal: a is in the upper half of the symbols, and b is in the upper half. x and y carry no information.

After the first layer one number at x holds the first predicate, and one at y the second. The second layer multiplies
both at cls and reads nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from lmtool.config.registry import build
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.configs.terms import InterchangeConfig, SoftConfig
from lmtool.distillation.interchange import Site, agreement
from lmtool.distillation.recording import Teacher
from lmtool.learners.base import BaseLearner
from lmtool.models.configs import BertConfig
from lmtool.models.heads.base import loss_sum
from lmtool.models.heads.sequence import SequenceHead, summary_index
from lmtool.nn.stack import Stack, StackState
from lmtool.training.precision import FP32_CPU
from lmtool.types import Batch, Packed, StepOutput, Target

SYMBOLS, LENGTH, RATE = 6, 5, 3e-3
AT = Site("inputs", 1, 1)


class Predicates(nn.Module):
    """Writes both predicates, as -1 or 1, into the last dimension at x and at y."""

    def forward(self, x_TH, context):
        x_NLH = x_TH.view(-1, LENGTH, x_TH.shape[1]).clone()
        for read, written in ((1, 3), (2, 4)):
            x_NLH[:, written, -1] = 2 * x_NLH[:, read, 1 + SYMBOLS // 2 : -1].sum(-1) - 1
        return x_NLH.flatten(0, 1)


class Equal(nn.Module):
    """Writes the product of both predicates at cls."""

    def forward(self, x_TH, context):
        x_NLH = x_TH.view(-1, LENGTH, x_TH.shape[1]).clone()
        x_NLH[:, 0, -1] = x_NLH[:, 3, -1] * x_NLH[:, 4, -1]
        return x_NLH.flatten(0, 1)


class Circuit(nn.Module):
    """The planted backbone: its states are one-hot tokens and one dimension to write in."""

    def __init__(self):
        super().__init__()
        self.stack = Stack([Predicates(), Equal()])
        self.config = SimpleNamespace(depths={"inputs": 2})
        self.hidden_size = SYMBOLS + 2

    def initialize(self, *_):
        pass

    def forward(self, inputs, rng=None, read_M=None):
        x_TH = nn.functional.pad(nn.functional.one_hot(inputs.tokens, SYMBOLS + 1).float(), (0, 1))
        x_TH = self.stack.run(StackState(x_TH, inputs, inputs.positions, None))
        return x_TH if read_M is None else x_TH[read_M]


class Classifier(BaseLearner):
    """Predicts two classes from the first token."""

    def __init__(self, backbone, seed=0):
        super().__init__(SimpleNamespace(name="equality"), backbone, None, seed)
        self.loss_weights = {"label": 1.0}
        self.heads["label"] = SequenceHead(backbone.hidden_size, 2)

    def counts(self, batch):
        return {"label": float(len(batch.targets["label"].labels))}

    def forward(self, batch, step):
        first_NH = self.backbone(
            batch.inputs, self.dropout_rng(batch, step), read_M=summary_index(batch.inputs, "first")
        )
        total = loss_sum(self.heads["label"](first_NH), batch.targets["label"].labels)
        return StepOutput({"label": total}, self.loss_weights)

    def examples(self, data, max_length):
        raise NotImplementedError

    def score(self, batch):
        raise NotImplementedError

    def predictors(self, train, examples):
        raise NotImplementedError


def planted_teacher() -> Teacher:
    """The planted teacher, as confident as a trained one."""
    learner = Classifier(Circuit())
    with torch.no_grad():
        learner.heads["label"].output.weight.zero_()
        learner.heads["label"].output.bias.zero_()
        learner.heads["label"].output.weight[:, -1] = torch.tensor([-2.0, 2.0])
    return Teacher(learner.requires_grad_(False).eval(), FP32_CPU, "planted")


def texts(count: int, seed: int) -> Batch:
    tokens = torch.randint(1, SYMBOLS + 1, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = 0
    upper = tokens > SYMBOLS // 2
    packed = Packed(tokens.flatten(), (LENGTH,) * count, {"segment": torch.zeros(count * LENGTH, dtype=torch.int64)})
    targets = {"label": Target((upper[:, 1] == upper[:, 2]).long())}
    return Batch(packed, targets, torch.arange(count) + seed * count, torch.zeros(count, dtype=torch.int32))


def student(seed: int) -> Classifier:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "feedforward_size": 128, "max_positions": 8}
    config = BertConfig(vocab_size=8, dropout=0.0, attention_dropout=0.0, initializer_std=0.1, **sizes)
    learner = Classifier(build(config, seed), seed)
    learner.backbone.initialize(learner.heads["label"], seed, "heads.label.")
    return learner


def train_student(terms: dict, steps: int, seed: int) -> Classifier:
    """A student trained with these terms only, by the planted teacher."""
    learner = student(seed)
    run = build(StandardConfig(gold=0.0, terms=terms), learner, [planted_teacher()])
    optimizer = torch.optim.AdamW(learner.parameters(), RATE, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    for step in range(1, steps + 1):
        batch = texts(128, seed * steps + step)
        counts, output = run.counts(batch), run(batch, step)
        loss = sum(output.loss_weights[name] * total / counts[name] for name, total in output.sums.items())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        rates.step()
    return learner


def measure_agreement(learner: Classifier) -> dict:
    return agreement(learner, planted_teacher(), [AT], [texts(1000, 10**6)], FP32_CPU)


SOFT = {"soft": SoftConfig(weight=1.0, temperature=1.0)}
INTERCHANGE = {
    "soft": SoftConfig(weight=0.5, temperature=1.0),
    "interchange": InterchangeConfig(weight=0.5, temperature=1.0),
}
