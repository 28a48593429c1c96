"""`lmtool plan ... measure=true`: a few real steps of the run, timed, in a folder that is taken away again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lmtool.commands import finetune, pretrain
from lmtool.commands.configs import FinetuneConfig, PretrainConfig
from lmtool.commands.opening import OpenRun
from lmtool.commands.reading import Reads, planned
from lmtool.commands.training import reading_of, settings_of
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.data.split import SplitData
from lmtool.distillation.distilled import Distilled
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.tasks.configs import GlueConfig
from lmtool.training.compiling import choose_compilation
from lmtool.training.loop import train
from lmtool.training.results import peak_memory
from lmtool.types import Step

WARM_UP, STEPS = 2, 5
_NEVER = 2**31


@dataclass(frozen=True)
class Measured:
    """step_seconds: the median of a few steps, loading, evaluation and saving left out; tokens: in these, a step.
    facts: of the loader. peak_bytes: of the process, or of the device."""

    step_seconds: float
    tokens: float
    facts: dict[str, Any]
    peak_bytes: int


def measured(config: PretrainConfig | FinetuneConfig) -> Measured:
    """Build the run as its command does and train a few steps of it. UserError where the words are several runs or none
    of their own."""
    if isinstance(config, FinetuneConfig) and isinstance(config.task, GlueConfig):
        raise UserError(f"measure=true: task={config.task.name} is a run of every task in it", "give one: task=sst2")
    if config.branch is not None:
        raise UserError("measure=true: a branch continues another run", "leave out branch=, or measure=")
    with TemporaryDirectory(prefix="lmtool-plan-") as place:
        changes: dict[str, Any] = {"run_dir": str(Path(place) / "run"), "name": None, "logger": {}}
        if isinstance(config, PretrainConfig):
            return Measured(**pretrain.run(config.model_copy(update=changes), [], _steps))
        return Measured(**finetune.run(config.model_copy(update={**changes, "forgetting": None}), [], _steps))


def _steps(
    opened: OpenRun,
    learner: BaseLearner,
    data: dict[str, SplitData],
    *_: Any,
    distilled: Distilled | None = None,
    phases: Sequence[Reads] = (),
) -> dict[str, Any]:
    """What `fit` does until it trains, then some steps. Returns the fields of a `Measured`."""
    config = opened.config
    parts = phases or [Reads(config, learner, data)]
    loader, plan = planned(config, learner, parts, opened.precision)
    learner.begin(loader.steps_in_epoch)
    if distilled is not None:
        distilled.begin(reading_of(parts[-1], opened.output.stage))
    compilation = choose_compilation(config.compile, opened.precision.device, plan.flops, config.max_minutes)
    settings = replace(
        settings_of(config, learner.metric, plan.flops_per_token, 0.0, compilation.on),
        max_steps=max(plan.steps, WARM_UP + STEPS) + 1, max_epochs=None, max_tokens=None, max_minutes=None,
        max_flops=None, log_every=1, evaluate_every=_NEVER, checkpoint_every=_NEVER, keep_every=None,
    )  # fmt: skip
    timed = _Timed(loader)
    trained = learner if distilled is None else distilled
    with suppress(_Enough):
        train(trained, timed, lambda step: {}, opened.folder, settings, config.optimizer, config.schedule)
    return {
        "step_seconds": statistics.median(timed.seconds[WARM_UP:]),
        "tokens": statistics.mean(timed.tokens[WARM_UP:]),
        "facts": parts[0].loader.facts(),
        "peak_bytes": peak_memory(opened.precision.device),
    }


class _Enough(Exception):
    """All steps that were asked for are done."""


class _Timed:
    """A loader that ends the training after a few steps, and knows how long each was, from when it was given on."""

    def __init__(self, loader: PackedLoader | PhasedLoader):
        self._loader = loader
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def steps(self, *arguments: Any) -> Iterator[Step]:
        for step in self._loader.steps(*arguments):
            began = time.perf_counter()
            yield step
            self.seconds.append(time.perf_counter() - began)
            self.tokens.append(sum(batch.tokens for batch in step.batches))
            if len(self.seconds) == WARM_UP + STEPS:
                raise _Enough
