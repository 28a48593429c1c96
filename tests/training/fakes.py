"""A tiny learner and loader with all features of real ones: two terms of different counts, dropout, tied weights,
parameter groups, several micro-batches, and epochs shorter than a run.

Shape letters: T tokens, N documents, M predicted positions, H width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from lmtool import random_streams
from lmtool.config.registry import lookup
from lmtool.runs.run_folder import RunFolder
from lmtool.training.configs import AdamWConfig, LinearConfig
from lmtool.training.progress import TrainingSettings
from lmtool.types import Batch, Packed, ParameterGroup, Step, StepOutput, Target

VOCABULARY, CLASSES, EXAMPLES = 64, 3, 40
assert lookup("optimizer", "adamw") and lookup("schedule", "linear")


class FakeLearner(nn.Module):
    """Two terms: "word" predicts some tokens with the tied embedding, "kind" predicts one class per document."""

    def __init__(self, hidden: int = 16, dropout: float = 0.1, seed: int = 0, kind_weight: float = 0.5):
        super().__init__()
        self.kind_weight = kind_weight
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.decode = nn.Linear(hidden, VOCABULARY)
        self.decode.weight = self.embed.weight
        self.classify = nn.Linear(hidden, CLASSES)
        self.unused = nn.Linear(2, 2)
        self.dropout = dropout
        self.loss_factor = 1.0
        generator = torch.Generator().manual_seed(random_streams.key(seed, "init"))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.2, generator=generator)

    def counts(self, batch: Batch) -> dict[str, float]:
        word = batch.targets["word"].labels
        assert word is not None
        return {"word": float(len(word)), "kind": float(len(batch.inputs.lengths))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        x_TH = self.embed(batch.inputs.tokens)
        x_TH = self.norm(x_TH + functional.gelu(self.dense(x_TH)))
        x_TH = functional.dropout(x_TH, self.dropout, self.training)
        word, kind = batch.targets["word"], batch.targets["kind"]
        assert word.at is not None and word.labels is not None and kind.labels is not None
        sums: dict[str, Tensor] = {}
        logits_MV = self.decode(x_TH.index_select(0, word.at))
        sums["word"] = functional.cross_entropy(logits_MV.float(), word.labels, reduction="sum") * self.loss_factor
        zeros_NH = x_TH.new_zeros(len(batch.inputs.lengths), x_TH.shape[1], dtype=torch.float32)
        pooled_NH = zeros_NH.index_add(0, batch.inputs.documents, x_TH.float())
        sums["kind"] = functional.cross_entropy(self.classify(pooled_NH).float(), kind.labels, reduction="sum")
        return StepOutput(sums, {"word": 1.0, "kind": self.kind_weight})

    def penalties(self) -> dict[str, Tensor]:
        return {"small": 1e-3 * self.dense.weight.square().sum()}

    def parameter_groups(self) -> list[ParameterGroup]:
        named = list(self.named_parameters())
        return [
            ParameterGroup("decay", [(name, parameter) for name, parameter in named if parameter.ndim >= 2]),
            ParameterGroup(
                "no_decay",
                [(name, parameter) for name, parameter in named if parameter.ndim < 2],
                weight_decay_scale=0.0,
            ),
        ]

    def on_step(self, step: int) -> None:
        """Do nothing."""


class FakeLoader:
    """Examples are functions of their number, and their order is a function of the epoch."""

    def __init__(self, batch_examples: int = 8, micro_batches: int = 2, seed: int = 0, poison_step: int | None = None):
        self.batch_examples, self.micro_batches, self.seed = batch_examples, micro_batches, seed
        self.poison_step = poison_step
        self.asked: list[dict[str, int] | None] = []

    def steps_in_epoch(self, epoch: int) -> int:
        return EXAMPLES // self.batch_examples

    def metadata(self) -> dict[str, Any]:
        return {"examples": EXAMPLES}

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        """Each rank reads every ranks-th example of each micro-batch."""
        self.asked.append(cursor)
        epoch, number = (cursor["epoch"], cursor["batch"]) if cursor else (0, 0)
        while True:
            order = np.random.default_rng([self.seed, epoch]).permutation(EXAMPLES)
            while number < self.steps_in_epoch(epoch):
                chosen = order[number * self.batch_examples : (number + 1) * self.batch_examples]
                poisoned = epoch * self.steps_in_epoch(epoch) + number + 1 == self.poison_step
                number += 1
                done = number == self.steps_in_epoch(epoch)
                cursor = {"epoch": epoch + done, "batch": 0 if done else number}
                parts = np.array_split(chosen, self.micro_batches)
                batches = [batch_of(part[rank::ranks], poisoned) for part in parts]
                yield Step(batches, cursor, epoch + number / self.steps_in_epoch(epoch))
            epoch, number = epoch + 1, 0


def batch_of(examples: np.ndarray, poisoned: bool = False) -> Batch:
    """Documents of 3 to 12 tokens; odd examples have word targets, so that micro-batches differ in their counts."""
    tokens, lengths, at, labels, kinds = [], [], [], [], []
    for example in examples:
        random = np.random.default_rng(int(example))
        document = random.integers(0, VOCABULARY, random.integers(3, 13))
        if example % 2:
            places = random.choice(len(document), 3, replace=False)
            at += [sum(lengths) + int(place) for place in places]
            labels += [int(document[place] * 7 % VOCABULARY) for place in places]
        tokens.append(document)
        lengths.append(len(document))
        kinds.append(int(document.sum() % CLASSES))
    inputs = Packed(torch.from_numpy(np.concatenate(tokens)), tuple(lengths))
    if poisoned:
        inputs.tokens[0] = VOCABULARY - 1
    targets = {
        "word": Target(torch.tensor(labels, dtype=torch.int64), at=torch.tensor(at, dtype=torch.int64)),
        "kind": Target(torch.tensor(kinds)),
    }
    numbers = torch.from_numpy(examples.copy())
    return Batch(inputs, targets, numbers, torch.zeros(len(examples), dtype=torch.int32))


OPTIMIZER = AdamWConfig(lr=1e-2)
SCHEDULE = LinearConfig()


class TokenizerFile:
    """A checkpoint extension that adds a file and records updates."""

    excluded: frozenset[str] = frozenset()

    def __init__(self, text: str):
        self.text = text
        self.updates: list[int] = []

    def on_update(self, step: int) -> None:
        self.updates.append(step)

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.text)


def settings(**changes: Any) -> TrainingSettings:
    chosen: dict[str, Any] = {
        "seed": 3, "metric": "loss", "greater_is_better": False, "device": "cpu", "precision": "fp32",
        "max_steps": 20, "log_every": 1, "evaluate_every": 5, "optimizer": OPTIMIZER, "schedule": SCHEDULE,
    }  # fmt: skip
    return TrainingSettings(**{**chosen, **changes})


def evaluator(learner: FakeLearner) -> Any:
    """Loss over all examples, without dropout."""

    def evaluate(step: int) -> dict[str, Any]:
        assert not learner.training
        batch = batch_of(np.arange(EXAMPLES)).to(learner.embed.weight.device)
        with torch.no_grad():
            output, counts = learner(batch, step), learner.counts(batch)
        return {"loss": float(output.sums["word"]) / counts["word"], "kind": float(output.sums["kind"])}

    return evaluate


def open_run(path: Path, config: Mapping[str, Any] | None = None, **keywords: Any) -> RunFolder:
    config = dict(config or {"model": {"name": "fake", "hidden": 16}, "max_steps": 20})
    return RunFolder(path, config, yaml.safe_dump(config), **keywords)


def train_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without measured speeds."""
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
