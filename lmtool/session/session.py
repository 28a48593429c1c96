"""A run that is ready to train: its folder, its data by phase and its learner. Every training verb creates one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.costs.plan_of_run import plan_in_phases, plan_of
from lmtool.data.configs import DataConfig
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.data.sources import MixtureSource, OnStage, Source
from lmtool.data.store import open_store
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.recording import StudentData
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits, evaluation_tokens
from lmtool.learners.mixed_examples import examples_of, predictors_of
from lmtool.reporting.costs import RunPlan
from lmtool.resolver.schema.run import PretrainConfig, RunConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import Contents
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import Compilation, select_compilation
from lmtool.training.precision import Precision
from lmtool.training.progress import TrainingSettings
from lmtool.weights.assemble import LoadReport, assemble
from lmtool.weights.base import Base


def text_of(
    config: DataConfig,
    source: Source,
    split: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    progress: OnStage | None,
    rows: Mapping[str, Rows],
    stride: int | None = None,
) -> SplitData:
    """One tokenized split of the text of a `data` section. rows: labeled rows to train on in addition to the text.
    stride: see `SplitData`."""
    if isinstance(source, MixtureSource):
        parts = source.config.parts()
        members = {
            title: text_of(parts[title], member, split, tokenizer, cache_dir, progress, {}, stride)
            for title, member in source.members.items()
        }
        return SplitData(split, rows=rows, stride=stride, members=members, fractions=source.fractions)
    store = open_store(source, split, tokenizer, cache_dir, progress)
    return SplitData(split, store, config.documents, rows, stride)


def tokenized_metadata(data: SplitData) -> JsonObject:
    """Size of a split's token store, and speed of building it, for the screens and the report."""
    if data.members:
        return {title: tokenized_metadata(part) for title, part in data.members.items()}
    metadata = data.text.metadata
    return {name: metadata[name] for name in ("bytes", "seconds", "bytes_per_second", "tokens_per_second")}


@dataclass(frozen=True)
class PhaseData:
    """The data of a phase, or of a run without phases. config: the phase's configuration. learner: makes the examples.
    data: the data by split."""

    config: RunConfig
    learner: BaseLearner
    data: Mapping[str, SplitData]

    @cached_property
    def examples(self) -> Examples:
        """The examples of the training data."""
        return examples_of(self.learner, self.data["train"], self.config.max_length)

    @cached_property
    def loader(self) -> PackedLoader:
        config = self.config
        return PackedLoader(
            self.examples, config.seed, config.batch_examples, config.batch_tokens, config.micro_batch_tokens,
            virtual_tokens=self.learner.virtual_tokens,
        )  # fmt: skip


def phases_of(
    config: PretrainConfig, learner: BaseLearner, tokenizer: Tokenizer, texts: Sequence[Mapping[str, SplitData]]
) -> list[PhaseData]:
    """The training data of each phase, or of a run without phases. texts: for each phase, its data by split. If a phase
    changes the objective, a learner of that objective on the meta device makes its examples."""
    phases = []
    for phase_config, data in zip(config.forms if config.phases else (config,), texts, strict=True):
        maker = learner
        if phase_config.objective != config.objective:
            with torch.device("meta"):
                maker, _ = assemble(phase_config, tokenizer)
        phases.append(PhaseData(phase_config, maker, data))
    return phases


def load_and_plan(
    config: RunConfig, learner: BaseLearner, parts: Sequence[PhaseData], precision: Precision
) -> tuple[PackedLoader | PhasedLoader, RunPlan]:
    """The loader of a run that reads these parts in order, and its plan."""
    loaders = [part.loader for part in parts]
    if not isinstance(config, PretrainConfig) or not config.phases:
        return loaders[0], plan_of(config, learner, loaders[0].metadata(), precision)
    plan, fractions = plan_in_phases(config, learner, [loader.metadata() for loader in loaders], precision)
    sections = [phase.data for phase in config.forms]
    same_text = [section == before for section, before in zip(sections, [sections[0], *sections], strict=False)]
    return PhasedLoader(loaders, fractions, same_text), plan


def phase_rows(plan: RunPlan, loader: PhasedLoader, steps: int) -> list[JsonObject]:
    """The phases of a run for result.json: the overrides (`given`) of each, its fraction of the budget (`share`), and
    its `first_step` and `last_step`, null for a phase without steps. steps: the number of steps of the run."""
    rows = []
    for phase, (first, last) in zip(plan.phases, loader.boundaries(steps), strict=True):
        ran = first <= last
        row = {"given": phase.overrides, "share": phase.share}
        rows.append(row | {"first_step": first if ran else None, "last_step": last if ran else None})
    return rows


@dataclass(frozen=True)
class Session:
    """The parts of a run.

    Attributes:
        run: Its folder, output, number format and process group.
        subject: The names of its components ("model", "task" or "objective", ...), for result.json and the screens.
        learner: The model that it trains.
        tokenizer: The learner's tokenizer.
        loaded: The parts that were loaded from a checkpoint; None for random weights.
        phases: The training data of each phase. Held-out text is processed with the settings of the last phase.
        metadata: Of the data, for the first screen and facts.json.
        contents: Hashes of the data.
        next_commands: Suggestions for the user.
        distilled: The student with its teachers, trained instead of the learner; None without distillation.
        base: The pretrained weights that checkpoints of a tuned run do not contain.
        tests: Labeled splits that are not used for selection.
    """

    run: OpenRun
    subject: Mapping[str, str]
    learner: BaseLearner
    tokenizer: Tokenizer
    loaded: LoadReport | None
    phases: Sequence[PhaseData]
    metadata: JsonMapping
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
        """The module that the loop trains: `distilled` with distillation, otherwise the learner."""
        return self.learner if self.distilled is None else self.distilled

    @cached_property
    def _loader_and_plan(self) -> tuple[PackedLoader | PhasedLoader, RunPlan]:
        return load_and_plan(self.config, self.learner, self.phases, self.run.precision)

    @property
    def loader(self) -> PackedLoader | PhasedLoader:
        return self._loader_and_plan[0]

    @property
    def plan(self) -> RunPlan:
        return self._loader_and_plan[1]

    @cached_property
    def compilation(self) -> Compilation:
        return select_compilation(
            self.config.compile, self.run.precision.device, self.plan.flops, self.config.max_minutes
        )

    @cached_property
    def held_out(self) -> HeldOutSplits:
        """The splits on which the run is scored."""
        last = self.phases[-1]
        return HeldOutSplits(
            self.learner, last.data, last.config.max_length, evaluation_tokens(last.config), self.config.seed,
            predictors_of(self.learner, last.data["train"], last.examples), last.learner,
        )  # fmt: skip

    @property
    def reading(self) -> StudentData:
        """The training data of the last phase, for teachers that read it before the first step."""
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
            forward_tokens=evaluation_tokens(config),
            progress=self.run.output.stage,
        )

    def settings(self, baseline_loss: float = 0.0) -> TrainingSettings:
        """The settings of the loop. baseline_loss: the loss of a constant prediction, to detect divergence."""
        config, metric = self.config, self.learner.metric
        shared = set(TrainingSettings.__dataclass_fields__) & set(type(config).model_fields)
        return TrainingSettings(
            metric=metric.name,
            greater_is_better=not metric.smaller_is_better,
            flops_per_token=self.plan.flops_per_token,
            baseline_loss=baseline_loss,
            compiles=self.compilation.on,
            chooses=config.distill.teaches_heads,
            **{name: getattr(config, name) for name in shared},
        )
