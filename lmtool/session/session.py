"""A session: a run that is ready to train, with its folder, learner, tokenizer and data. Every training command builds
one.

A run may have several phases, which train on different data or settings one after the other; a run without phases is
treated as one phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.costs.plan import plan_in_phases, plan_of
from lmtool.data.configs import DataConfig
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.data.sources import MixtureSource, OnStage, Source
from lmtool.data.store import open_store
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.recording import StudentData
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import (
    CHEAP_EVALUATION_TOKENS,
    EVALUATED_SHARE,
    MIN_EVALUATION_ROWS,
    EvaluationSize,
    HeldOutSplits,
    evaluation_tokens,
)
from lmtool.learners.mixed_sources import examples_of, predictors_of
from lmtool.reporting.costs import RunPlan
from lmtool.resolver.commands import PretrainConfig, RunConfig
from lmtool.session.open_run import OpenRun
from lmtool.session.provenance import Contents
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import Compilation, select_compilation
from lmtool.training.progress import TrainingSettings
from lmtool.weights.assemble import LoadReport, assemble
from lmtool.weights.base import Base

SLOW_FLOPS = 2e10
"""FLOPs per second of a slow machine, two busy CPU cores in fp32: the size of the evaluations of a run in minutes."""


def tokenized_split(
    config: DataConfig,
    source: Source,
    split: str,
    tokenizer: Tokenizer,
    cache_dir: str,
    progress: OnStage | None,
    rows: Mapping[str, Rows],
    stride: int | None = None,
) -> SplitData:
    """Tokenizes one split of a text, or opens its token store if this was done before. rows: labeled rows to train on
    in addition to the text, by task. stride: the distance between windows of text, see `SplitData`."""
    if isinstance(source, MixtureSource):
        parts = source.config.member_configs()
        members = {
            title: tokenized_split(parts[title], member, split, tokenizer, cache_dir, progress, {}, stride)
            for title, member in source.members.items()
        }
        return SplitData(split, rows=rows, stride=stride, members=members, fractions=source.fractions)
    store = open_store(source, split, tokenizer, cache_dir, progress)
    return SplitData(split, store, config.documents, rows, stride)


def tokenized_metadata(data: SplitData) -> JsonObject:
    """Returns the size of a split's token store and how fast it was built, for the screens and the report."""
    if data.members:
        return {title: tokenized_metadata(part) for title, part in data.members.items()}
    metadata = data.text.metadata
    return {name: metadata[name] for name in ("bytes", "seconds", "bytes_per_second", "tokens_per_second")}


@dataclass(frozen=True)
class PhaseData:
    """The data of one phase by split. config: the run's configuration with the changes of the phase. learner: turns the
    data into examples."""

    config: RunConfig
    learner: BaseLearner
    data: Mapping[str, SplitData]

    @cached_property
    def examples(self) -> Examples:
        """The examples that the learner makes of the training data."""
        return examples_of(self.learner, self.data["train"], self.config.max_length)

    @cached_property
    def loader(self) -> PackedLoader:
        """The loader of the training examples."""
        config = self.config
        return PackedLoader(
            self.examples, config.seed, config.batch_examples, config.batch_tokens, config.micro_batch_tokens,
            virtual_tokens=self.learner.virtual_tokens, words=self._words,
        )  # fmt: skip

    @property
    def _words(self) -> int | None:
        data = self.data["train"]
        is_text = isinstance(self.config, PretrainConfig) and self.config.objective.reads_text
        return data.text.metadata["words"] if is_text and not data.members and not data.rows else None


def build_phases(
    config: PretrainConfig, learner: BaseLearner, tokenizer: Tokenizer, texts: Sequence[Mapping[str, SplitData]]
) -> list[PhaseData]:
    """Combines each phase's configuration with its data by split. texts: the data of each phase. learner: the run's,
    which makes the examples."""
    phases = []
    for phase_config, data in zip(config.phase_configs if config.phases else (config,), texts, strict=True):
        examples_learner = learner
        if phase_config.objective != config.objective:
            # A learner on the meta device, without weights, makes the examples of the phase's objective.
            with torch.device("meta"):
                examples_learner, _ = assemble(phase_config, tokenizer)
        phases.append(PhaseData(phase_config, examples_learner, data))
    return phases


def phase_rows(plan: RunPlan, loader: PhasedLoader, steps: int) -> list[JsonObject]:
    """Describes the phases of a finished run for result.json: the overrides of each (`given`), its fraction of the
    budget (`share`), and its `first_step` and `last_step`, null for a phase that the run did not reach."""
    rows = []
    for phase, (first, last) in zip(plan.phases, loader.boundaries(steps), strict=True):
        ran = first <= last
        row = {"given": phase.overrides, "share": phase.share}
        rows.append(row | {"first_step": first if ran else None, "last_step": last if ran else None})
    return rows


@dataclass(frozen=True)
class Session:
    """A run that is ready to train.

    Attributes:
        run: The run's folder, output, device, number format and process group.
        subject: The names of the run's components by section ("model", "task" or "objective", ...), for result.json and
            the screens.
        learner: The model that the run trains and saves, with its objective or task.
        tokenizer: The learner's tokenizer.
        loaded: Which parts of the learner were loaded from a checkpoint; None for random weights.
        phases: The data of each phase. Held-out data is processed with the settings of the last phase.
        metadata: Metadata of the data, for the first screen and facts.json.
        contents: Hashes of the data, which identify it.
        next_commands: Commands that the last screen suggests to the user.
        distilled: The student together with its teachers, which is trained instead of the learner; None without
            distillation.
        base: The pretrained weights that the checkpoints of a tuned run do not contain; None if
            the checkpoints are complete.
        tests: Labeled splits, by name, that are scored once at the end and not used for selection.
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
        """The run's configuration."""
        return self.run.config

    @property
    def trained_module(self) -> BaseLearner | Distilled:
        """The module that the training loop trains: `distilled` if there is one, otherwise the learner."""
        return self.learner if self.distilled is None else self.distilled

    @cached_property
    def _loader_and_plan(self) -> tuple[PackedLoader | PhasedLoader, RunPlan]:
        config, precision, loaders = self.config, self.run.precision, [phase.loader for phase in self.phases]
        if not isinstance(config, PretrainConfig) or not config.phases:
            return loaders[0], plan_of(config, self.learner, loaders[0].metadata(), precision)
        plan, fractions = plan_in_phases(config, self.learner, [loader.metadata() for loader in loaders], precision)
        sections = [phase.data for phase in config.phase_configs]
        # Whether each phase reads the same text as the phase before it.
        same_text = [section == before for section, before in zip(sections, [sections[0], *sections], strict=False)]
        return PhasedLoader(loaders, fractions, same_text), plan

    @property
    def loader(self) -> PackedLoader | PhasedLoader:
        """The loader of the training data of all phases."""
        return self._loader_and_plan[0]

    @property
    def plan(self) -> RunPlan:
        """The planned steps, tokens, FLOPs and memory of the run."""
        return self._loader_and_plan[1]

    @cached_property
    def compilation(self) -> Compilation:
        """Whether the model is compiled, and why."""
        return select_compilation(
            self.config.compile, self.run.precision.device, self.plan.flops, self.config.max_minutes
        )

    @cached_property
    def held_out(self) -> HeldOutSplits:
        """The held-out splits on which the run is scored."""
        last = self.phases[-1]
        return HeldOutSplits(
            self.learner, last.data, last.config.max_length, evaluation_tokens(last.config), self.config.seed,
            predictors_of(self.learner, last.data["train"], last.examples), last.learner, self._evaluation_size,
        )  # fmt: skip

    @property
    def _evaluation_size(self) -> EvaluationSize | None:
        """The size of an evaluation during training. By default the evaluations of a run together read at most
        `EVALUATED_SHARE` of the tokens that it trains on. The size does not depend on measured times, so that a resumed
        run has the same; a run in minutes is that of a slow machine."""
        config = self.config
        if config.evaluate_rows == "all":
            return None
        if config.evaluate_rows != "auto":
            return EvaluationSize(config.evaluate_rows)
        plan = self.plan
        if config.max_minutes is None or config.evaluate_every is not None:
            interval = config.evaluate_every or max(1, plan.steps // 10)
            return EvaluationSize(MIN_EVALUATION_ROWS, EVALUATED_SHARE * interval * plan.tokens_per_step)
        tokens = 6 * config.max_minutes * SLOW_FLOPS / plan.flops_per_token
        if config.max_steps is not None:
            tokens = min(tokens, config.max_steps / 10 * plan.tokens_per_step)
        return EvaluationSize(MIN_EVALUATION_ROWS, EVALUATED_SHARE * tokens)

    @cached_property
    def evaluate_every(self) -> int | None:
        """Steps between evaluations; None for a tenth of the run. A short run is evaluated less often, but twice, so
        that `EVALUATED_SHARE` holds although an evaluation has a minimum size."""
        config, plan, (tokens, _) = self.config, self.plan, self.held_out.tokens
        evaluations = max(2, int(EVALUATED_SHARE * plan.tokens / max(tokens, 1)))
        if config.evaluate_rows != "auto" or config.max_minutes is not None or tokens < CHEAP_EVALUATION_TOKENS:
            return config.evaluate_every
        return config.evaluate_every or (math.ceil(plan.steps / evaluations) if evaluations < 10 else None)

    @property
    def student_data(self) -> StudentData:
        """The training data of the last phase, in the form in which teachers read it before the first step."""
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
        """Returns the settings of the training loop. baseline_loss: the loss of a constant prediction, with which the
        loop detects divergence."""
        config, metric = self.config, self.learner.metric
        common_fields = set(TrainingSettings.__dataclass_fields__) & set(type(config).model_fields)
        return TrainingSettings(
            metric=metric.name,
            greater_is_better=not metric.smaller_is_better,
            flops_per_token=self.plan.flops_per_token,
            baseline_loss=baseline_loss,
            compiles=self.compilation.on,
            selects_best=config.distill.teaches_heads,  # the score of untrained heads says nothing
            **{name: getattr(config, name) for name in common_fields} | {"optimizer": config.scaled_optimizer},
        )
