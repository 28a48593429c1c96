"""Build, train and score every legal combination of a model family, a tuning method and a kind of task.

    python scripts/matrix.py [--families bert,gpt] [--methods lora,prompt] [--kinds seq2seq] [--pairs]

Each is a run at the smallest size from a checkpoint of the family, in one process. Each must satisfy:
- a method whose additions start neutral reproduces the scores of its base, bit for bit;
- the losses of three steps are finite; frozen parameters get no gradient and no optimizer state, and do not change by a
  bit; some trainable parameter changes;
- each development row is predicted once, with finite scores;
- the saved tensors, loaded on top of the base, reproduce the predictions bit for bit.
A refused combination must name an override that makes it legal.

--pairs selects few combinations that cover every legal pair (family, method), (family, kind) and (method, kind). Prints
a table of families by methods with the number of kinds, and all refusals and errors; the exit status is 3 if there are
errors.
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
from common import listed
from torch import Tensor

from lmtool.config import compose, overrides, tables
from lmtool.config.tables import build
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.errors import ConfigError, UserError
from lmtool.learners.base import ModelWithHeads
from lmtool.learners.held_out import HeldOutSplits
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import lm_head
from lmtool.reporting.console import Output, print_table
from lmtool.resolver.decoding import decoded
from lmtool.resolver.schema.run import FinetuneConfig
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

FAMILIES = [entry.name for entry in tables.entries("model") if entry.config.__module__.startswith("lmtool.")]
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
"""The arguments that select each method."""
MOVED = ("prompt", "prefix", "ptuning")
"""Methods whose additions change the outputs from the start."""
SIZES = {
    "num_layers": 4, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "vocab_size": 320, "max_positions": 64,
}  # fmt: skip
NARROW = {"head_size": 8, "embedding_size": 12}
STEPS = 3
CPU = torch.device("cpu")
WORDS = ("a", "fine", "warm", "film", "and", "dull", "cold", "mess", "the", "story", "of", "this", "good", "bad")


class Cell(NamedTuple):
    family: str
    method: str
    kind: str


@dataclass(frozen=True)
class Outcome:
    """refused: message and hint of an illegal combination. wrong: the checks that failed."""

    cell: Cell
    refused: str = ""
    wrong: str = ""


# --- data ----------------------------------------------------------------------------------------------------------


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(5 + number % 4))


def rows_of(kind: str, number: int) -> dict[str, Any]:
    """A row of a task. Its number determines the label."""
    text = sentence(number)
    first = text.split()[0]
    return {
        "classification": {"text": text, "label": ("no", "yes")[number % 2]},
        "regression": {"text": text, "label": number % 5 / 2},
        "multi_label": {"text": text, "label": [["a"], ["b"], ["a", "b"], []][number % 4]},
        "token_classification": {"tokens": text.split(), "tags": [("O", "B-X")[len(w) % 2] for w in text.split()]},
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
"""The arguments that name the columns of each kind, unless they are `text` and `label`."""
KINDS = list(COLUMNS)


def write_rows(folder: Path) -> None:
    """Writes a folder for each kind: 24 rows for training, 6 for evaluation."""
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for split, numbers in (("train", range(24)), ("dev", range(24, 30))):
            lines = [json.dumps(rows_of(kind, number)) for number in numbers]
            (folder / kind / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@cache
def data_of(folder: Path, kind: str) -> TaskData:
    """The rows of a kind, decoded."""
    return load_task(configuration(Cell("bart", "full", kind), folder).task, 0, folder, True)


@cache
def tokenizer_of(folder: Path, config: str) -> Tokenizer:
    """A tokenizer trained on the texts of all kinds. config: its configuration as JSON."""
    columns = [texts for kind in KINDS for texts in data_of(folder, kind).texts()]
    section: TokenizerConfig = tables.Choice("tokenizer").validate(json.loads(config))
    return tokenizer_of_rows(section, columns, SIZES["vocab_size"])


# --- configuration -------------------------------------------------------------------------------------------------


@cache
def section(name: str, *words: str) -> Any:
    """One section of the configuration that `lmtool finetune` composes. No YAML of a group changes another section, so
    that sections of a model, a method and a kind can be combined."""
    read = overrides.read([*words], compose.offers_of_primary("finetune"))
    if read.problems:
        raise ConfigError(read.problems)
    return compose.compose("finetune", read)[name]


def configuration(cell: Cell, folder: Path, more: Sequence[str] = ()) -> FinetuneConfig:
    """The configuration of `lmtool finetune` for a cell. more: further overrides, from hints. ConfigError if the
    combination is illegal."""
    chosen = {
        "model": [f"model={cell.family}_tiny"],
        "tuning": [*METHODS[cell.method]],
        "task": [f"task={cell.kind}", f"task.path={folder / cell.kind}", *COLUMNS[cell.kind]],
    }
    given: dict[str, Any] = {"max_length": 48}
    for word in more:
        key, _, value = word.partition("=")
        group = key.partition(".")[0].partition("/")[0]
        if group not in chosen:
            given[key] = json.loads(value) if value[:1].isdigit() else value
        elif key == group:
            chosen[group] = [word]
        else:
            inside = key.replace("/", ".") + "."  # overrides of the previous choice's keys go with it
            remaining = [
                other for other in chosen[group] if other.partition("=")[0] != key and not other.startswith(inside)
            ]
            chosen[group] = [*remaining, word]
    sections = {group: section(group, *words) for group, words in chosen.items()}
    rest = {name: section(name) for name in ("tokenizer", "optimizer", "schedule")}
    model = sections["model"]
    small = {name: size for name, size in (SIZES | NARROW).items() if model.get(name)}  # models without the size have 0
    if cell.kind == "seq2seq":
        sections["task"] = {**sections["task"], "generation": {**sections["task"]["generation"], "max_new_tokens": 4}}
    budget = {"max_epochs": 1.0, "batch_examples": 8, "device": "cpu", "precision": "fp32", "checkpoint": "none"}
    return decoded("finetune", {**rest, **sections, **budget, **given, "model": {**model, **small}})


# --- one combination -----------------------------------------------------------------------------------------------


def start_of(config: FinetuneConfig) -> Weights:
    """The weights of a checkpoint of the family, drawn by another seed than the run's."""
    learner = LanguageModel(build(config.model, 1), 1)
    return Weights({name: tensor.clone() for name, tensor in learner.state_dict().items()}, Path(), "the base")


class LanguageModel(ModelWithHeads):
    """The model of a family, with the head of its language model if it generates text."""

    def __init__(self, backbone: Backbone, seed: int):
        super().__init__(backbone, seed)
        if backbone.config.architecture != "encoder":
            self.add_head("lm", lm_head(backbone))


def trial(cell: Cell, folder: Path) -> Outcome:
    """Builds, trains, scores, saves and rebuilds the model of a cell."""
    try:
        config = configuration(cell, folder)
    except ConfigError as error:
        return Outcome(cell, refused=refusal(error), wrong=hints_that_fail(cell, folder, error))
    try:
        return Outcome(cell, wrong="; ".join(failures(config, folder, cell)))
    except (UserError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Outcome(cell, wrong=f"{type(error).__name__}: {error}")


def refusal(error: ConfigError) -> str:
    return " | ".join(f"{problem.message} -> {problem.hint}" for problem in error.problems)


def hints_that_fail(cell: Cell, folder: Path, error: ConfigError, more: tuple[str, ...] = ()) -> str:
    """Describes what is wrong with the hints of a refusal. The hint of each problem must name overrides that, with the
    first override for each other problem, make the combination legal or lead to a refusal whose hints do. more: the
    overrides of earlier hints."""
    alternatives = [overrides_in(problem.hint or "") for problem in error.problems]
    if not all(alternatives):
        return f"a hint names no override: {refusal(error)}"
    wrong = []
    for number, offered in enumerate(alternatives):
        others = [word for other, words in enumerate(alternatives) if other != number for word in shlex.split(words[0])]
        for words in offered:
            typed = (*more, *others, *shlex.split(words))
            try:
                configuration(cell, folder, typed)
            except ConfigError as still:
                wrong += [f"{words} is refused too: {refusal(still)}"] if more else []
                wrong += [] if more else filter(None, [hints_that_fail(cell, folder, still, typed)])
    return "; ".join(wrong)


def overrides_in(hint: str) -> list[str]:
    """The alternatives of a hint: "set a=1, b=2 or c=3"."""
    return hint.removeprefix("set ").replace(", ", " or ").split(" or ") if hint.startswith("set ") else []


def failures(config: FinetuneConfig, folder: Path, cell: Cell) -> Iterator[str]:
    """The checks that a legal combination fails."""
    data = data_of(folder, cell.kind)
    config = config.model_copy(update={"task": config.task.model_copy(update=labels_of(data))})
    tokenizer = tokenizer_of(folder, config.tokenizer.model_dump_json())
    start, splits = start_of(config), data.splits()
    learner, report = assemble(config, tokenizer, start)
    assert report is not None
    held_out = HeldOutSplits(learner, splits, config.max_length, 512, 0)
    batch = next(iter(held_out.first.loader.epoch_batches()))
    if neutral(cell):
        plain = configuration(cell._replace(method="full"), folder).model_copy(update={"task": config.task})
        base, _ = assemble(plain, tokenizer, start)
        if not torch.equal(scored(base, batch), scored(learner, batch)):
            yield "its first scores differ from those of its base"
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    yield from trained(config, learner, splits)
    after = learner.state_dict()
    frozen = {name for name in after if name not in learner.learning and name in dict(learner.named_parameters())}
    yield from (f"{name} is frozen but changed" for name in frozen if not torch.equal(before[name], after[name]))
    if not any(not torch.equal(before[name], after[name]) for name in learner.learning):
        yield "no parameter changed"
    evaluation = held_out.score(FP32_CPU, calibrates=True)
    rows = next(iter(data.validation.values()))
    predicted = len(evaluation.first.predictions)
    if predicted != len(rows):
        yield f"{predicted} predictions for {len(rows)} rows"
    if not all(math.isfinite(value) for value in evaluation.metrics().values()):
        yield f"scores that are not finite: {evaluation.metrics()}"
    left = base_tensor_names(learner, report.loaded)
    saved = {name: tensor for name, tensor in learner.state_dict().items() if name not in left}
    whole = Weights({**{name: start.tensors[name] for name in left}, **saved}, Path(), "the run")
    again, _ = assemble(config, tokenizer, trained=whole)
    if not torch.equal(scored(learner, batch), scored(again, batch)):
        yield "the model rebuilt from the saved tensors predicts differently"


def labels_of(data: TaskData) -> dict[str, Any]:
    """The classes in the data, for the configuration of the task."""
    labels = getattr(data.config, "labels", None)
    return {} if labels is None else {"labels": labels}


def neutral(cell: Cell) -> bool:
    """Whether a method leaves the outputs unchanged before training."""
    return cell.method.partition(",")[0] not in MOVED and cell.method not in ("head, scalar mix", "head, last 4")


@torch.no_grad()
def scored(learner: TaskLearner, batch: Batch) -> Tensor:
    """The losses of a batch in evaluation mode."""
    learner.eval()
    return learner.score(batch)[learner.term].losses


def trained(config: FinetuneConfig, learner: TaskLearner, splits: Mapping[str, SplitData]) -> Iterator[str]:
    """Trains a few steps and describes what is wrong with them."""
    loader = PackedLoader(learner.examples(splits["train"], config.max_length), 0, config.batch_examples)
    learner.train()
    learner.begin(loader.steps_in_epoch)
    groups = learner.parameter_groups()
    named, optimizer = named_parameters(groups), build(config.optimizer, groups)
    set_learning_rate(optimizer, max(config.optimizer.lr, 1e-3))
    for step, given in zip(range(1, STEPS + 1), loader.steps(), strict=False):
        loss = float(gradients(Plain(learner), given, step, 0, FP32_CPU).loss)
        if not math.isfinite(loss):
            yield f"a loss of {loss} in step {step}"
        for name, parameter in learner.named_parameters():
            if parameter.grad is not None and name not in named:
                yield f"{name} is frozen but has a gradient"
        apply_gradients(optimizer, None, list(named.values()), config.optimizer.clip_norm)
    if any(name.partition(".")[2] not in learner.learning for name in state_tensors(optimizer, named)):
        yield "the optimizer has a state for a frozen parameter"


# --- which combinations --------------------------------------------------------------------------------------------


def pairs(families: Sequence[str], methods: Sequence[str], kinds: Sequence[str], folder: Path) -> list[Cell]:
    """Few combinations that cover every pair of a family, a method and a kind that some legal combination has, and one
    for each other pair (family, method)."""
    legal = cache(lambda cell: is_legal(cell, folder))
    chosen: list[Cell] = []
    for (row, family), (column, method) in product(enumerate(families), enumerate(methods)):
        turned = [kinds[(row + column + step) % len(kinds)] for step in range(len(kinds))]
        own = [Cell(family, method, kind) for kind in turned]
        chosen.append(next(filter(legal, own), own[0]))
    held = {part for cell in chosen if legal(cell) for part in parts(cell)}
    for kind in kinds:
        lacking = [[Cell(family, method, kind) for method in methods] for family in families]
        lacking += [[Cell(family, method, kind) for family in families] for method in methods]
        for cells in lacking:
            shared = frozenset.intersection(*map(parts, cells))
            cell = None if shared <= held else next(filter(legal, cells), None)
            if cell is not None:
                chosen.append(cell)
                held |= parts(cell)
    return chosen


def parts(cell: Cell) -> frozenset[tuple[str, str]]:
    return frozenset({(cell.family, cell.method), (cell.family, cell.kind), (cell.method, cell.kind)})


def is_legal(cell: Cell, folder: Path) -> bool:
    try:
        configuration(cell, folder)
    except ConfigError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=listed("--families", FAMILIES), default=FAMILIES)
    parser.add_argument("--methods", action="append", choices=METHODS, help="may be given several times (all)")
    parser.add_argument("--kinds", type=listed("--kinds", KINDS), default=KINDS)
    parser.add_argument("--pairs", action="store_true", help="few combinations that cover all legal pairs")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a product of these sizes is slower on two
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(folder)
        parts_of_cells = options.families, options.methods or [*METHODS], options.kinds
        cells = (
            pairs(*parts_of_cells, folder) if options.pairs else [Cell(*names) for names in product(*parts_of_cells)]
        )
        outcomes = [trial(cell, folder) for cell in cells]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    show(outcomes)
    print(
        f"{len(outcomes):,} combinations in {time.monotonic() - started:.0f} s: "
        f"{sum(not outcome.refused and not outcome.wrong for outcome in outcomes):,} hold, "
        f"{sum(bool(outcome.refused) for outcome in outcomes):,} are refused, {len(wrong):,} are wrong"
    )
    sys.exit(3 if wrong else 0)


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints the table, the refusals with their reasons, and the errors."""
    families = list(dict.fromkeys(outcome.cell.family for outcome in outcomes))
    table = []
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        row = [method]
        for family in families:
            own = [each for each in outcomes if (each.cell.family, each.cell.method) == (family, method)]
            held = sum(not each.refused and not each.wrong for each in own)
            row.append(f"{held}" + (f" of {len(own)}" if held < len(own) else ""))
        table.append(row)
    print_table(Output(), ["method", *families], table, heading="kinds of task that hold")
    for said in ("refused", "wrong"):
        reasons: dict[str, list[Cell]] = {}
        for outcome in outcomes:
            reasons.setdefault(getattr(outcome, said), []).append(outcome.cell)
        reasons.pop("", None)
        for reason, cells in reasons.items():
            print(f"{said} ({len(cells)}, such as {' and '.join(cells[0])}): {reason}")


if __name__ == "__main__":
    main()
