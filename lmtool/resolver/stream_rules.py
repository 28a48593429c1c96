"""What goes with state that a model carries from batch to batch by lanes of running text (data/loader.py): one process
reads all lanes from the beginning of an epoch to its end. Each rule names the key that asks for something else, and the
nearest that does not. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from lmtool.config.rules import rule
from lmtool.errors import Problem
from lmtool.resolver.schema.phases import OF_A_PASS, words_of
from lmtool.resolver.schema.run import PretrainConfig

_OTHERWISE = "or data.documents=separate, with which no state is carried"


def reads_lanes(model: Any, objective: Any, data: Any) -> bool:
    """Whether a run of these sections reads its text in lanes."""
    return bool(model.carries_state and objective.reads_lanes and data.name != "mixture" and data.documents == "joined")


@rule(PretrainConfig, "model", "max_length")
def memory_fits_positions(model: Any, max_length: int) -> Iterator[Problem]:
    """A segment and the memory in front of it are a text that the model has positions for."""
    if max_length <= model.max_positions < max_length + model.remembers and model.remembers:
        yield Problem(
            "model.max_positions",
            f"max_length={max_length} behind a memory of {model.remembers} tokens is more than "
            f"model.max_positions={model.max_positions}",
            f"give model.max_positions={max_length + model.remembers}, or shorter memories, in training and evaluation",
        )


@rule(PretrainConfig, "model", "objective", "data")
def something_is_remembered(model: Any, objective: Any, data: Any) -> Iterator[Problem]:
    """What a memory keeps is of the tokens that an objective reuses, where it reuses some and reads on from there."""
    fits = model.architecture in objective.architectures
    if fits and getattr(objective, "reuse", None) == 0 and reads_lanes(model, objective, data):
        yield Problem(
            "model.memory_length",
            f"model.memory_length={model.remembers} keeps states of reused tokens, and objective.reuse=0",
            "give objective.reuse=256 for windows of 512, or model.memory_length=0",
        )


@rule(PretrainConfig, "model", "objective", "data", "devices")
def lanes_stay_in_a_process(model: Any, objective: Any, data: Any, devices: int | None) -> Iterator[Problem]:
    """The state of a lane is where its text was read."""
    processes = devices or int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and reads_lanes(model, objective, data):
        message = f"devices={processes}: model={model.name} carries state from batch to batch, which stays in a process"
        yield Problem("devices", message, f"give devices=1, {_OTHERWISE}")


@rule(PretrainConfig, "model", "objective", "data", "distill")
def one_model_carries_state(model: Any, objective: Any, data: Any, distill: Any) -> Iterator[Problem]:
    """A checkpoint has the state of one model."""
    if distill.name != "none" and reads_lanes(model, objective, data):
        message = (
            f"distill={distill.name}: model={model.name} carries state from batch to batch, and no other model does"
        )
        yield Problem("distill", message, f"give distill=none, {_OTHERWISE}")


@rule(PretrainConfig, "model", "objective", "data", "phases")
def phases_keep_the_lanes(model: Any, objective: Any, data: Any, phases: Any) -> Iterator[Problem]:
    """Lanes of another number, or of other text, would have no state."""
    for number, phase in enumerate(phases):
        changed = {key: phase[key] for key in OF_A_PASS if key in phase}
        if changed and reads_lanes(model, objective, data):
            message = (
                f"phases.{number} gives {words_of(changed)}: model={model.name} carries the state of lanes of text"
            )
            yield Problem("phases", f"{message}, which these keys cut", f"leave them to the run, {_OTHERWISE}")
