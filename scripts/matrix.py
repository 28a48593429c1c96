"""Build, train and score every legal combination of a model family, a tuning method and a kind of task.

    python scripts/matrix.py [--families bert,gpt] [--methods lora,prompt] [--kinds seq2seq] [--pairs]

Each combination finetunes the smallest model of the family from a random checkpoint, in this process. It is checked
that:
- a method whose added parameters start neutral (LoRA, adapters) first reproduces the losses of the base model, bit for
  bit;
- the losses of three steps are finite; frozen parameters get no gradient and no optimizer state, and do not change by a
  bit; some trainable parameter changes;
- each development row gets one prediction, and all scores are finite;
- the saved tensors, loaded on top of the base model, reproduce the losses bit for bit.
If lmtool refuses a combination, the hint must name overrides that make it legal.

With --pairs, a small set of combinations covers every legal pair (family, method), (family, kind) and (method, kind).
Prints a table of methods by families with the number of task kinds that pass, then all refusals and failed checks. The
exit status is 3 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import name_list
from torch import Tensor

from lmtool.config import compose, registry
from lmtool.config.registry import build
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.errors import ConfigError, UserError
from lmtool.learners.base import ModelWithHeads
from lmtool.learners.held_out import HeldOutSplits
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import lm_head
from lmtool.reporting.console import Output, print_table
from lmtool.resolver.commands import FinetuneConfig
from lmtool.resolver.decoding import decode_config
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.engine import Plain
from lmtool.training.optimizers import named_parameters, set_learning_rate, state_tensors
from lmtool.training.precision import FP32_CPU
from lmtool.training.step import apply_gradients, gradients
from lmtool.types import Batch
from lmtool.weights.assemble import assemble
from lmtool.weights.base import base_tensor_names
from lmtool.weights.reading import Weights

FAMILIES = [entry.name for entry in registry.entries("model") if entry.config.__module__.startswith("lmtool.")]
METHODS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full, unfrozen in turn": ("tuning/schedule=gradual_unfreezing", "tuning.schedule.every_steps=1"),
    "full, L2-SP": ("tuning/regularization=l2_sp",),
    "full, mixout": ("tuning/regularization=mixout",),
    "last_n": ("tuning=last_n", "tuning.layers=1"),
    "bitfit": ("tuning=bitfit",),
    "head": ("tuning=head",),
    "head, scalar mix": ("tuning=head", "tuning.layers=scalar_mix"),
    "head, last 4": ("tuning=head", "tuning.layers=concat_last_4"),
    "lora": ("tuning=lora", "tuning.rank=2"),
    "ia3": ("tuning=ia3",),
    "adapter, houlsby": ("tuning=adapter", "tuning.placement=houlsby", "tuning.bottleneck=4"),
    "adapter, pfeiffer": ("tuning=adapter", "tuning.placement=pfeiffer", "tuning.bottleneck=4"),
    "adapter, parallel": ("tuning=adapter", "tuning.placement=parallel", "tuning.bottleneck=4"),
    "prompt": ("tuning=prompt", "tuning.length=3"),
    "prefix": ("tuning=prefix", "tuning.length=3", "tuning.inner_size=8"),
    "ptuning": ("tuning=ptuning", "tuning.length=3"),
    "ptuning, deep": ("tuning=ptuning", "tuning.deep=true", "tuning.length=3"),
}
"""The overrides that select each tuning method."""
NOT_NEUTRAL = ("prompt", "prefix", "ptuning", "ptuning, deep", "head, scalar mix", "head, last 4")
"""Methods that change the outputs of the model before any training step."""
SIZES = {
    "num_layers": 4, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "vocab_size": 320, "max_positions": 64,
}  # fmt: skip
NARROW_SIZES = {"head_size": 8, "embedding_size": 12}
STEPS = 3
CPU = torch.device("cpu")
WORDS = ("a", "fine", "warm", "film", "and", "dull", "cold", "mess", "the", "story", "of", "this", "good", "bad")


class Cell(NamedTuple):
    """A combination: the name of a model family, a key of METHODS and a key of COLUMNS."""

    family: str
    method: str
    kind: str


@dataclass(frozen=True)
class Outcome:
    """The result of one combination. refusal: the messages and hints with which lmtool refused the combination; empty
    if it is legal. failures: descriptions of the checks that failed; empty if all passed."""

    cell: Cell
    refusal: str = ""
    failures: str = ""

    @property
    def passed(self) -> bool:
        return not self.refusal and not self.failures


# --- data ----------------------------------------------------------------------------------------------------------


def sentence(number: int) -> str:
    """Returns 5 to 8 words. Equal numbers give equal sentences."""
    return " ".join(WORDS[(number * 7 + index * (number % 5 + 1)) % len(WORDS)] for index in range(5 + number % 4))


def task_row(kind: str, number: int) -> dict[str, Any]:
    """Returns a row for a kind of task. Its number determines the text and the label."""
    text = sentence(number)
    first = text.split()[0]
    return {
        "classification": {"text": text, "label": ("no", "yes")[number % 2]},
        "regression": {"text": text, "label": number % 5 / 2},
        "multi_label": {"text": text, "label": [["a"], ["b"], ["a", "b"], []][number % 4]},
        "token_classification": {
            "tokens": text.split(), "tags": [("O", "B-X")[len(word) % 2] for word in text.split()],
        },
        "extractive_qa": {
            "id": str(number), "question": "which word ?", "context": text,
            "answers": [{"text": first, "answer_start": 0}],
        },
        "multiple_choice": {"text": text, "first": "good", "second": "bad", "label": number % 2},
        "span_classification": {"text": text, "span": [0, 1 + number % 3], "label": ("no", "yes")[number % 2]},
        "seq2seq": {"source": text, "target": first},
    }[kind]  # fmt: skip


COLUMNS: dict[str, tuple[str, ...]] = {
    "classification": (),
    "regression": (),
    "multi_label": (),
    "token_classification": (),
    "extractive_qa": ("task.text=[question,context]", "task.label=answers"),
    "multiple_choice": ("task.text=[text,first,second]",),
    "span_classification": ("task.text=[text,span]",),
    "seq2seq": ("task.text=[source]", "task.label=target", "task.target_tokens=8"),
}
"""For each kind of task, the overrides that name its columns if they are not the defaults (`text` and `label`)."""
KINDS = list(COLUMNS)


def write_rows(folder: Path) -> None:
    """Writes a subfolder for each kind of task, with 24 training rows and 6 development rows."""
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for split, numbers in (("train", range(24)), ("dev", range(24, 30))):
            lines = [json.dumps(task_row(kind, number)) for number in numbers]
            (folder / kind / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@cache
def load_rows(folder: Path, kind: str) -> TaskData:
    """Loads the rows that `write_rows` has written for a kind of task."""
    return load_task(configuration(Cell("bart", "full", kind), folder).task, 0, folder, True)


@cache
def train_tokenizer(folder: Path, config: str) -> Tokenizer:
    """Trains a tokenizer on the texts of all kinds of tasks. config: the tokenizer's configuration as JSON, since the
    key of the cache must be hashable."""
    columns = [texts for kind in KINDS for texts in load_rows(folder, kind).texts()]
    section: TokenizerConfig = registry.Choice("tokenizer").validate(json.loads(config))
    return tokenizer_of_rows(section, columns, SIZES["vocab_size"])


# --- configuration -------------------------------------------------------------------------------------------------


@cache
def section(name: str, *arguments: str) -> Any:
    """Returns one section of the configuration that `lmtool finetune` composes from overrides. The sections of a model,
    a method and a kind can be combined freely, because the YAML of a group sets no key of another section."""
    read = compose.read_overrides([*arguments], compose.accepted_overrides("finetune"))
    if read.problems:
        raise ConfigError(read.problems)
    return compose.compose("finetune", read)[name]


def configuration(cell: Cell, folder: Path, hint_overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Returns the configuration of `lmtool finetune` for a combination. Raises ConfigError if it is illegal.

    Args:
        cell: the combination
        folder: the folder that `write_rows` has filled
        hint_overrides: further overrides, from the hints of a refusal
    """
    overrides_by_group = {
        "model": [f"model={cell.family}_tiny"],
        "tuning": [*METHODS[cell.method]],
        "task": [f"task={cell.kind}", f"task.path={folder / cell.kind}", *COLUMNS[cell.kind]],
    }
    top_level: dict[str, Any] = {"max_length": 48}
    for override in hint_overrides:
        key, _, value = override.partition("=")
        group = key.partition(".")[0].partition("/")[0]
        if group not in overrides_by_group:
            top_level[key] = json.loads(value) if value[:1].isdigit() else value
        elif key == group:
            overrides_by_group[group] = [override]
        else:
            nested = key.replace("/", ".") + "."  # a new component does not have the keys of the previous component
            overrides_by_group[group] = [
                previous
                for previous in overrides_by_group[group]
                if previous.partition("=")[0] != key and not previous.startswith(nested)
            ] + [override]
    sections = {group: section(group, *arguments) for group, arguments in overrides_by_group.items()}
    rest = {name: section(name) for name in ("tokenizer", "optimizer", "schedule")}
    model = sections["model"]
    # A family that lacks one of these sizes has no such key, or 0.
    small = {name: size for name, size in (SIZES | NARROW_SIZES).items() if model.get(name)}
    if cell.kind == "seq2seq":
        sections["task"] = {**sections["task"], "generation": {**sections["task"]["generation"], "max_new_tokens": 4}}
    budget = {"max_epochs": 1.0, "batch_examples": 8, "device": "cpu", "precision": "fp32", "checkpoint": "none"}
    return decode_config("finetune", {**rest, **sections, **budget, **top_level, "model": {**model, **small}})


# --- one combination -----------------------------------------------------------------------------------------------


def initial_checkpoint(config: FinetuneConfig) -> Weights:
    """Returns random weights for the family, as if read from a checkpoint; their seed is not the run's."""
    learner = LanguageModel(build(config.model, 1), 1)
    return Weights({name: tensor.clone() for name, tensor in learner.state_dict().items()}, Path(), "the base")


class LanguageModel(ModelWithHeads):
    """A model of the family, with a language modeling head unless it is an encoder."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__(backbone, seed)
        if backbone.config.architecture != "encoder":
            self.add_head("lm", lm_head(backbone))


def trial(cell: Cell, folder: Path) -> Outcome:
    """Builds, trains, scores, saves and rebuilds the model of a combination."""
    try:
        config = configuration(cell, folder)
    except ConfigError as error:
        return Outcome(cell, describe(error), failures=failing_hints(cell, folder, error))
    try:
        return Outcome(cell, failures="; ".join(failed_checks(config, folder, cell)))
    except (UserError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Outcome(cell, failures=f"{type(error).__name__}: {error}")


def describe(error: ConfigError) -> str:
    """Returns the message and the hint of each problem."""
    return " | ".join(f"{problem.message} -> {problem.hint}" for problem in error.problems)


def failing_hints(cell: Cell, folder: Path, error: ConfigError, earlier: tuple[str, ...] = ()) -> str:
    """Describes the hints of a refusal that do not help; empty if all of them do.

    Each alternative in a problem's hint is tried together with the first alternative for every other problem. The
    combination must then be legal, or be refused once more with hints that make it legal.

    Args:
        cell: the refused combination
        folder: the folder that `write_rows` has filled
        error: the refusal
        earlier: the overrides from the hints of the first refusal, if this is the second one
    """
    alternatives = [overrides_in(problem.hint or "") for problem in error.problems]
    if not all(alternatives):
        return f"a hint names no override: {describe(error)}"
    failing = []
    for index, hint_texts in enumerate(alternatives):
        for_others = [hints[0] for other, hints in enumerate(alternatives) if other != index]
        for text in hint_texts:
            arguments = (*earlier, *shlex.split(" ".join([*for_others, text])))
            try:
                configuration(cell, folder, arguments)
            except ConfigError as second_refusal:
                if earlier:
                    failing.append(f"{text} is refused too: {describe(second_refusal)}")
                elif described := failing_hints(cell, folder, second_refusal, arguments):
                    failing.append(described)
    return "; ".join(failing)


def overrides_in(hint: str) -> list[str]:
    """Returns the alternatives in a hint: a=1, b=2 and c=3 for "set a=1, b=2 or c=3"; empty if it does not begin with
    "set"."""
    return hint.removeprefix("set ").replace(", ", " or ").split(" or ") if hint.startswith("set ") else []


def failed_checks(config: FinetuneConfig, folder: Path, cell: Cell) -> Iterator[str]:
    """Describes each check that a legal combination fails."""
    data = load_rows(folder, cell.kind)
    config = config.model_copy(update={"task": config.task.model_copy(update=labels_of(data))})
    tokenizer = train_tokenizer(folder, config.tokenizer.model_dump_json())
    start, splits = initial_checkpoint(config), data.splits()
    learner, report = assemble(config, tokenizer, start)
    assert report is not None
    held_out = HeldOutSplits(learner, splits, config.max_length, 512, 0)
    batch = next(iter(held_out.first.loader.epoch_batches()))
    if cell.method not in NOT_NEUTRAL:
        plain = configuration(cell._replace(method="full"), folder).model_copy(update={"task": config.task})
        base, _ = assemble(plain, tokenizer, start)
        if not torch.equal(losses(base, batch), losses(learner, batch)):
            yield "before training, its losses differ from those of the base model"
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    yield from train(config, learner, splits)
    after = learner.state_dict()
    frozen = {
        name for name in after if name not in learner.trainable_names and name in dict(learner.named_parameters())
    }
    yield from (f"{name} is frozen but changed" for name in frozen if not torch.equal(before[name], after[name]))
    if not any(not torch.equal(before[name], after[name]) for name in learner.trainable_names):
        yield "no trainable parameter changed"
    evaluation = held_out.score(FP32_CPU, calibrates=True)
    rows = next(iter(data.validation.values()))
    predicted = len(evaluation.first.predictions)
    if predicted != len(rows):
        yield f"{predicted} predictions for {len(rows)} rows"
    if not all(math.isfinite(value) for value in evaluation.metrics().values()):
        yield f"scores that are not finite: {evaluation.metrics()}"
    unsaved = base_tensor_names(learner, report.loaded)
    saved = {name: tensor for name, tensor in learner.state_dict().items() if name not in unsaved}
    complete = Weights({**{name: start.tensors[name] for name in unsaved}, **saved}, Path(), "the run")
    rebuilt, _ = assemble(config, tokenizer, trained=complete)
    if not torch.equal(losses(learner, batch), losses(rebuilt, batch)):
        yield "the losses of the model rebuilt from the saved tensors differ"


def labels_of(data: TaskData) -> dict[str, Any]:
    """Returns the classes in the data as an update of the task's configuration; empty if the kind has no classes."""
    labels = getattr(data.config, "labels", None)
    return {} if labels is None else {"labels": labels}


@torch.no_grad()
def losses(learner: TaskLearner, batch: Batch) -> Tensor:
    """Returns the losses of a batch in evaluation mode."""
    learner.eval()
    return learner.score(batch)[learner.term].losses


def train(config: FinetuneConfig, learner: TaskLearner, splits: Mapping[str, SplitData]) -> Iterator[str]:
    """Trains the learner for STEPS steps and describes each check that fails."""
    loader = PackedLoader(learner.examples(splits["train"], config.max_length), 0, config.batch_examples)
    learner.train()
    for scheme in learner.schemes:
        scheme.set_steps_in_epoch(loader.steps_in_epoch)
    groups = learner.parameter_groups()
    named, optimizer = named_parameters(groups), build(config.optimizer, groups)
    set_learning_rate(optimizer, max(config.optimizer.lr, 1e-3))
    for number, step in zip(range(1, STEPS + 1), loader.steps(), strict=False):
        loss = float(gradients(Plain(learner), step, number, 0, FP32_CPU).loss)
        if not math.isfinite(loss):
            yield f"the loss of step {number} is {loss}"
        for name, parameter in learner.named_parameters():
            if parameter.grad is not None and name not in named:
                yield f"{name} is frozen but has a gradient"
        apply_gradients(optimizer, None, list(named.values()), config.optimizer.clip_norm)
    if any(name.partition(".")[2] not in learner.trainable_names for name in state_tensors(optimizer, named)):
        yield "the optimizer has a state for a frozen parameter"


# --- selecting combinations ----------------------------------------------------------------------------------------


def covering_cells(families: Sequence[str], methods: Sequence[str], kinds: Sequence[str], folder: Path) -> list[Cell]:
    """Selects a small set of combinations: for each family and method a legal one (or any, if none is legal), then more
    until every pair with a kind of task is covered that occurs in a legal combination."""
    legal = cache(lambda cell: is_legal(cell, folder))
    selected: list[Cell] = []
    for (row, family), (column, method) in product(enumerate(families), enumerate(methods)):
        # Each cell begins with another kind, so that the first pass covers most pairs with a kind.
        rotated = [kinds[(row + column + step) % len(kinds)] for step in range(len(kinds))]
        candidates = [Cell(family, method, kind) for kind in rotated]
        selected.append(next(filter(legal, candidates), candidates[0]))
    covered = {pair for cell in selected if legal(cell) for pair in pairs_in(cell)}
    for kind in kinds:
        lines = [[Cell(family, method, kind) for method in methods] for family in families]
        lines += [[Cell(family, method, kind) for family in families] for method in methods]
        for cells in lines:
            common_pairs = frozenset.intersection(*map(pairs_in, cells))
            cell = None if common_pairs <= covered else next(filter(legal, cells), None)
            if cell is not None:
                selected.append(cell)
                covered |= pairs_in(cell)
    return selected


def pairs_in(cell: Cell) -> frozenset[tuple[str, str]]:
    """Returns the pairs (family, method), (family, kind) and (method, kind) of a combination."""
    return frozenset({(cell.family, cell.method), (cell.family, cell.kind), (cell.method, cell.kind)})


def is_legal(cell: Cell, folder: Path) -> bool:
    try:
        configuration(cell, folder)
    except ConfigError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=name_list("--families", FAMILIES), default=FAMILIES)
    parser.add_argument(
        "--methods", action="append", choices=METHODS, help="a tuning method; may be repeated (default: all)"
    )
    parser.add_argument("--kinds", type=name_list("--kinds", KINDS), default=KINDS)
    parser.add_argument("--pairs", action="store_true", help="a small set that covers all legal pairs")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrix products of these sizes are slower on two threads
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(folder)
        names = options.families, options.methods or [*METHODS], options.kinds
        cells = (
            covering_cells(*names, folder) if options.pairs else [Cell(*combination) for combination in product(*names)]
        )
        outcomes = [trial(cell, folder) for cell in cells]
    failed = sum(bool(outcome.failures) for outcome in outcomes)
    show(outcomes)
    print(
        f"{len(outcomes):,} combinations in {time.monotonic() - started:.0f} s: "
        f"{sum(outcome.passed for outcome in outcomes):,} passed, "
        f"{sum(bool(outcome.refusal) for outcome in outcomes):,} refused, {failed:,} failed"
    )
    sys.exit(3 if failed else 0)


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints the table, then each refusal and each failure with the number of combinations that have it."""
    families = list(dict.fromkeys(outcome.cell.family for outcome in outcomes))
    table = []
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        row = [method]
        for family in families:
            passed = [each.passed for each in outcomes if (each.cell.family, each.cell.method) == (family, method)]
            row.append(f"{sum(passed)}" + ("" if all(passed) else f" of {len(passed)}"))
        table.append(row)
    print_table(Output(), ["method", *families], table, heading="kinds of task that pass")
    for label in ("refused", "failed"):
        reasons: dict[str, list[Cell]] = {}
        for outcome in outcomes:
            reasons.setdefault(outcome.refusal if label == "refused" else outcome.failures, []).append(outcome.cell)
        reasons.pop("", None)
        for reason, cells in reasons.items():
            print(f"{label} ({len(cells)}, such as {' and '.join(cells[0])}): {reason}")


if __name__ == "__main__":
    main()
