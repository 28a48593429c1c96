"""Rules across sections: what no section can know alone. Each names the keys and the nearest legal override."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmtool.commands.configs import FinetuneConfig, PredictConfig, PretrainConfig, RunConfig, TokenizerCommandConfig
from lmtool.config.rules import rule
from lmtool.config.tables import entries
from lmtool.errors import Problem


def _fitting(group: str, model: Any) -> list[str]:
    """Names of a group's components that take the model's architecture, its own objective first."""
    found = [one.name for one in entries(group) if model.architecture in getattr(one.config, "architectures", ())]
    return sorted(found, key=lambda name: name != model.default_objective.get("name"))


def _models(architectures: Iterable[str], name: str) -> list[str]:
    """Models of these architectures, those first whose own objective is `name`, with one value changed at most."""
    found = [one for one in entries("model") if getattr(one.config, "architecture", "") in architectures]

    def far(entry: Any) -> tuple[bool, bool]:
        own = entry.config.default_objective
        return own.get("name") != name, len(own) > 2

    return [one.name for one in sorted(found, key=far)]


def _article(architecture: str) -> str:
    return f"{'an' if architecture.startswith('enc') else 'a'} {architecture.replace('_', '-')}"


def _misfit(group: str, chosen: Any, name: str, model: Any) -> Iterator[Problem]:
    takes = getattr(chosen, "architectures", ())
    if model.architecture in takes:
        return
    other = [f"{group}={one}" for one in _fitting(group, model)[:1]]
    other += [f"model={one}" for one in _models(takes, name)[:1]]
    kinds = " or ".join(_article(one) for one in takes) or "no known architecture"
    yield Problem(
        group,
        f"{group}={name} trains {kinds}; model={model.name} is {_article(model.architecture)}",
        f"give {' or '.join(other)}" if other else None,
    )


@rule(PretrainConfig, "objective", "model")
def objective_fits_model(objective: Any, model: Any) -> Iterator[Problem]:
    """An objective names the architectures it trains."""
    yield from _misfit("objective", objective, objective.name, model)


@rule(PretrainConfig, "objective", "model")
def members_fit_model(objective: Any, model: Any) -> Iterator[Problem]:
    """So does each member of a mixture."""
    for member in objective.configs() if objective.name == "mixture" else ():
        for problem in _misfit("objective", member, member.name, model):
            fitting = [one for one in _fitting("objective", model) if one != "mixture"]
            typed = [one.name for one in objective.configs() if one.name in fitting]
            kept = list(dict.fromkeys([*typed, *fitting]))[: max(2, len(typed))]
            hint = f"give objective.members=[{','.join(kept)}]"
            yield Problem("objective.members", f"objective.members: {problem.message}", hint)


@rule(PretrainConfig, "objective", "max_steps")
def the_second_stage_is_reached(objective: Any, max_steps: int | None) -> Iterator[Problem]:
    """Where the generator learns first, the model learns after it."""
    if getattr(objective, "training", "joint") == "two_stage" and max_steps is not None:
        first = objective.generator_steps
        if first >= max_steps:
            yield Problem(
                "objective.generator_steps",
                f"objective.generator_steps={first} leaves the model no step of max_steps={max_steps}",
                f"give objective.generator_steps={max(1, max_steps // 2)} or max_steps={2 * first}",
            )


@rule(PretrainConfig, "tokenizer", "objective", "model")
def tokenizer_has_the_special_tokens(tokenizer: Any, objective: Any, model: Any) -> Iterator[Problem]:
    """A vocabulary that is yet to be trained will have the special tokens that the objective puts into texts."""
    members = objective.configs() if objective.name == "mixture" else (objective,)
    needed = [role for one in members if model.architecture in one.architectures for role in one.roles]
    missing = [] if tokenizer.roles is None else [role for role in needed if role not in tokenizer.roles]
    if missing:
        own = model.suggested_tokenizer()
        words = [f"tokenizer={own.pop('name', 'wordpiece')}", *(f"tokenizer.{key}={one}" for key, one in own.items())]
        words = [word.replace("True", "true").replace("False", "false") for word in words]
        yield Problem(
            "tokenizer",
            f"tokenizer={tokenizer.name} has no {missing[0]} token, which objective={objective.name} needs",
            f"leave tokenizer= out: model={model.name} takes {' '.join(words)}",
        )


@rule(FinetuneConfig, "task", "model")
def task_fits_model(task: Any, model: Any) -> Iterator[Problem]:
    """A task names the architectures it can stand on."""
    yield from _misfit("task", task, task.name, model)


@rule(PretrainConfig, "objective", "model")
def pairs_need_segments(objective: Any, model: Any) -> Iterator[Problem]:
    """Next-sentence prediction tells its two segments apart by the model's segment table."""
    if getattr(objective, "pairs", "none") != "none" and getattr(model, "segments", 0) < 2:
        yield Problem(
            "objective.pairs",
            f"objective.pairs={objective.pairs} needs a model with two segments; model={model.name} has "
            f"{getattr(model, 'segments', 0)}",
            "give objective.pairs=none",
        )


@rule(RunConfig, "batch_examples", "batch_tokens")
def one_batch_size(batch_examples: int | None, batch_tokens: int | None) -> Iterator[Problem]:
    """A batch is sized in examples or in tokens."""
    if batch_examples is not None and batch_tokens is not None:
        yield Problem(
            "batch_tokens",
            f"batch_examples={batch_examples} and batch_tokens={batch_tokens}: a batch has one size",
            "set the other to null: batch_tokens=null or batch_examples=null",
        )
    if batch_examples is None and batch_tokens is None:
        yield Problem("batch_tokens", "no batch size given", "give batch_examples=32 or batch_tokens=2048")


@rule(RunConfig, "batch_tokens", "max_length")
def batch_holds_a_sequence(batch_tokens: int | None, max_length: int) -> Iterator[Problem]:
    """A batch holds at least one sequence."""
    if batch_tokens is not None and batch_tokens < max_length:
        yield Problem(
            "batch_tokens",
            f"batch_tokens={batch_tokens} holds no sequence of max_length={max_length}",
            f"give batch_tokens={max_length} or more, or max_length={max(8, batch_tokens)}",
        )


@rule(RunConfig, "micro_batch_tokens", "max_length")
def micro_batch_holds_a_sequence(micro_batch_tokens: int | None, max_length: int) -> Iterator[Problem]:
    """A micro-batch holds at least one sequence."""
    if micro_batch_tokens is not None and micro_batch_tokens < max_length:
        yield Problem(
            "micro_batch_tokens",
            f"micro_batch_tokens={micro_batch_tokens} holds no sequence of max_length={max_length}",
            f"give micro_batch_tokens={max_length} or more",
        )


@rule(RunConfig, "max_length", "model")
def length_fits_positions(max_length: int, model: Any) -> Iterator[Problem]:
    """No sequence is longer than the model's table of positions."""
    positions = getattr(model, "max_positions", None)
    if positions is not None and max_length > positions:
        yield Problem(
            "max_length",
            f"max_length={max_length} is more than model.max_positions={positions}",
            f"give max_length={positions} at most",
        )


@rule(RunConfig, "model")
def positions_fit_model(model: Any) -> Iterator[Problem]:
    """A family has the kinds of positions its maths allows; rotary ones turn pairs of a head's dimensions."""
    positions, kinds = getattr(model, "positions", None), getattr(model, "position_kinds", None)
    if positions is None:
        return
    if kinds is not None and positions.name not in kinds:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name}: model={model.name} has {' or '.join(kinds)} positions only",
            f"give model/positions={kinds[0]}",
        )
    head_size = getattr(model, "head_size", None) or model.hidden_size // model.num_heads
    if positions.even_heads and head_size % 2:
        yield Problem(
            "model.positions",
            f"model/positions={positions.name} turns pairs of dimensions; a head of model={model.name} has {head_size}",
            "give model/positions=alibi, or another model.num_heads",
        )


@rule(RunConfig, "max_steps", "max_epochs", "max_tokens", "max_minutes", "max_flops")
def some_budget(*budgets: float | None) -> Iterator[Problem]:
    """A run ends some time."""
    if all(one is None for one in budgets):
        names = "max_steps, max_epochs, max_tokens, max_minutes or max_flops"
        yield Problem("max_steps", f"no budget given: one of {names}", "give max_steps=10000, for example")


@rule(RunConfig, "tokenizer", "model")
def vocabulary_fits_embedding(tokenizer: Any, model: Any) -> Iterator[Problem]:
    """The embedding has a row for every entry of the vocabulary."""
    asked, rows = getattr(tokenizer, "vocab_size", None), getattr(model, "vocab_size", None)
    if asked is not None and rows is not None and asked > rows:
        yield Problem(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={asked} is more than model.vocab_size={rows}",
            f"give tokenizer.vocab_size={rows} or model.vocab_size={asked}",
        )


@rule(RunConfig, "name", "run_dir")
def one_place(name: str | None, run_dir: str | None) -> Iterator[Problem]:
    """A run has one folder."""
    if name is not None and run_dir is not None and Path(run_dir).name != name:
        yield Problem("run_dir", f"name={name} and run_dir={run_dir}: a run has one folder", "give one of the two")


@rule(FinetuneConfig, "task")
def task_has_data(task: Any) -> Iterator[Problem]:
    """Labelled data come from somewhere."""
    if all(getattr(task, where, None) is None for where in ("path", "hub", "embedded")):
        what = f"missing required value: task.path; task {task.name} names no data of its own"
        yield Problem("task.path", what, "give task.path=FOLDER, or a file to train on")


@rule(RunConfig, "device", running=True)
def device_is_there(device: str) -> Iterator[Problem]:
    """A CUDA device was asked for, and the machine has a driver for one. What the driver counts is known later."""
    if not device.startswith("cuda") or not sys.platform.startswith("linux"):
        return
    if not any(os.path.exists(one) for one in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        yield Problem("device", f"device={device}: this machine has no such device", "give device=cpu or device=auto")


@rule(PredictConfig, "text", "pair", "input")
def something_to_read(text: str | None, pair: str | None, source: str | None) -> Iterator[Problem]:
    """Predict reads one text or one file."""
    if (text is None) == (source is None):
        what = "neither text nor input given" if text is None else "text and input given"
        yield Problem("text", f"{what}: one of them is read", 'give text="..." or input=FILE (- reads standard input)')
    if pair is not None and text is None:
        yield Problem("pair", "pair is the second text, and text, the first, is not given", 'give text="..." too')


@rule(TokenizerCommandConfig, "tokenizer")
def tokenizer_is_trained(tokenizer: Any) -> Iterator[Problem]:
    """This command trains one; a tokenizer that exists needs no training."""
    if not getattr(tokenizer, "reads_text", True):
        kinds = [one.name for one in entries("tokenizer") if getattr(one.config, "reads_text", True)]
        what = f"tokenizer={tokenizer.name} exists already; this command trains one"
        yield Problem("tokenizer", what, f"give tokenizer={' or '.join(kinds)}")


@rule(TokenizerCommandConfig, "tokenizer")
def vocabulary_has_a_size(tokenizer: Any) -> Iterator[Problem]:
    """Without a model, the size of the vocabulary must be typed."""
    if tokenizer.vocab_size is None:
        yield Problem(
            "tokenizer.vocab_size", "missing required value: tokenizer.vocab_size", "give tokenizer.vocab_size=8192"
        )
