"""`lmtool plan ... measure=true`: a few real steps of the run, timed, in a folder that is removed afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.errors import UserError
from lmtool.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.fit import temporary_session, train_few_steps
from lmtool.tasks.configs import GlueConfig
from lmtool.training.profiling import StopTraining
from lmtool.training.results import peak_memory
from lmtool.types import Step

WARM_UP, STEPS = 2, 5


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
    with temporary_session(config) as session:
        timed = _TimedLoader(session.loader)
        train_few_steps(session, timed, WARM_UP + STEPS, log_every=1)
        return Measured(
            statistics.median(timed.seconds[WARM_UP:]),
            statistics.mean(timed.tokens[WARM_UP:]),
            session.phases[0].loader.facts(),
            peak_memory(session.run.precision.device),
        )


class _TimedLoader:
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
                raise StopTraining
