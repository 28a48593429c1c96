"""A run that is ready to train: its folder, its data and its learner, built. Every training verb makes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.data.split import SplitData
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.seen import StudentData
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits, evaluation_tokens
from lmtool.learners.mixed_examples import predictors_of
from lmtool.reporting.plan import RunPlan
from lmtool.resolver.schema.run import RunConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.phases import PhaseData, planned
from lmtool.session.provenance import Contents
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import Compilation, choose_compilation
from lmtool.training.progress import TrainingSettings
from lmtool.weights.bases import Base
from lmtool.weights.loading import LoadReport


@dataclass(frozen=True)
class Session:
    """The parts of a run.

    run: its folder, output, number format and process group. subject: what result.json and the screens call the run
    ("model", "task" or "objective", ...). loaded: what was read of a checkpoint; None for random weights. phases: the
    training data, one entry a phase; held-out text is read as in the last one. metadata: of the data, for the first
    screen and facts.json. contents: hashes of the data. next_commands: what the user may type next. distilled: the
    student and its teachers, which is trained in place of the learner. base: what the checkpoints of a tuned run leave
    out. tests: labelled splits that choose nothing.
    """

    run: OpenRun
    subject: Mapping[str, str]
    learner: BaseLearner
    tokenizer: Tokenizer
    loaded: LoadReport | None
    phases: Sequence[PhaseData]
    metadata: Mapping[str, Any]
    contents: Contents
    next_commands: Sequence[str]
    distilled: Distilled | None = None
    base: Base | None = None
    tests: Mapping[str, SplitData] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def trained(self) -> BaseLearner | Distilled:
        """The module that the loop trains: the learner, or the distillation around it."""
        return self.learner if self.distilled is None else self.distilled

    @cached_property
    def _planned(self) -> tuple[PackedLoader | PhasedLoader, RunPlan]:
        return planned(self.config, self.learner, self.phases, self.run.precision)

    @property
    def loader(self) -> PackedLoader | PhasedLoader:
        return self._planned[0]

    @property
    def plan(self) -> RunPlan:
        return self._planned[1]

    @cached_property
    def compilation(self) -> Compilation:
        return choose_compilation(
            self.config.compile, self.run.precision.device, self.plan.flops, self.config.max_minutes
        )

    @cached_property
    def held_out(self) -> HeldOutSplits:
        """The splits that the run is scored on."""
        last = self.phases[-1]
        return HeldOutSplits(
            self.learner, last.data, last.config.max_length, evaluation_tokens(last.config), self.config.seed,
            predictors_of(self.learner, last.data["train"], last.examples), last.learner, self.run.group,
        )  # fmt: skip

    @property
    def reading(self) -> StudentData:
        """What a teacher must know of the training data before the first step."""
        last = self.phases[-1]
        config = last.config
        return StudentData(
            data=last.data["train"],
            max_length=config.max_length,
            examples=last.examples,
            loader=last.loader,
            max_steps=config.max_steps,
            max_epochs=config.max_epochs,
            sizes={"batch_examples": config.batch_examples, "batch_tokens": config.batch_tokens},
            tokens=evaluation_tokens(config),
            progress=self.run.output.stage,
        )

    def settings(self, uninformed_loss: float = 0.0) -> TrainingSettings:
        """The settings of the loop. uninformed_loss: the loss when the input is ignored, to recognize an explosion."""
        config, metric = self.config, self.learner.metric
        shared = set(TrainingSettings.__dataclass_fields__) & set(type(config).model_fields)
        return TrainingSettings(
            metric=metric.name,
            greater_is_better=not metric.smaller_is_better,
            flops_per_token=self.plan.flops_per_token,
            uninformed_loss=uninformed_loss,
            compiles=self.compilation.on,
            chooses=config.distill.teaches_heads,
            **{name: getattr(config, name) for name in shared},
        )
