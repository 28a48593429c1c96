"""Rules for a run in phases: what goes with them, and that none of its keys is read by nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lmtool.config.rules import rule
from lmtool.distillation.configs import DistillConfig, NoDistillConfig
from lmtool.errors import Problem
from lmtool.schema.phases import OF_A_PASS
from lmtool.schema.run import PretrainConfig

Phases = tuple[dict[str, Any], ...]


@rule(PretrainConfig, "phases", "max_epochs", "max_steps")
def passes_are_alike(phases: Phases, max_epochs: float | None, max_steps: int | None) -> Iterator[Problem]:
    """A number of passes says how long a run is where all phases have passes of one length."""
    differing = [key for key in OF_A_PASS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        other = f"max_steps={max_steps} is a budget" if max_steps is not None else "with max_steps=10000 or max_tokens="
        yield Problem(
            "max_epochs",
            f"max_epochs={max_epochs:g}: a pass is not of one length in phases that differ in {', '.join(differing)}",
            f"give max_epochs=null: {other}" if max_steps is not None else f"give max_epochs=null {other}",
        )


@rule(PretrainConfig, "phases", "max_length")
def length_is_read(phases: Phases, max_length: int) -> Iterator[Problem]:
    """The run's own length is that of the phases that give none."""
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        yield Problem(
            "max_length",
            f"max_length={max_length} is read by no phase: each has its own",
            f"give phases.0.max_length={max_length}, or leave max_length= out",
        )


@rule(PretrainConfig, "phases", "distill")
def students_have_one_form(phases: Phases, distill: DistillConfig) -> Iterator[Problem]:
    """What a teacher says of a text is kept for one form of its examples."""
    if phases and not isinstance(distill, NoDistillConfig):
        yield Problem(
            "phases",
            f"distill={distill.name}: a distilled run has no phases",
            "give phases=[], and a run for each phase, the next one from the checkpoint of the one before",
        )
