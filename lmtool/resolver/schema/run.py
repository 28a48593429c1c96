"""What each command reads: the run-wide keys, and the sections whose classes their rooms define."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from lmtool.config.auto import AUTO, Auto
from lmtool.config.base import Variant
from lmtool.config.tables import Choice, Several, lookup
from lmtool.data.configs import DataConfig
from lmtool.distillation.configs import DistillConfig, NoDistillConfig
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.reporting.trackers.configs import TrackerConfig
from lmtool.resolver.schema.base import DEVICE, CommandConfig
from lmtool.resolver.schema.phases import normalised, overridden, variants
from lmtool.resolver.schema.use import AskConfig as AskConfig
from lmtool.resolver.schema.use import CheckConfig as CheckConfig
from lmtool.resolver.schema.use import DoctorConfig as DoctorConfig
from lmtool.resolver.schema.use import EmbedConfig as EmbedConfig
from lmtool.resolver.schema.use import EvaluateConfig as EvaluateConfig
from lmtool.resolver.schema.use import GenerateConfig as GenerateConfig
from lmtool.resolver.schema.use import InspectAttentionConfig as InspectAttentionConfig
from lmtool.resolver.schema.use import InspectPositionsConfig as InspectPositionsConfig
from lmtool.resolver.schema.use import InspectTokenizerConfig as InspectTokenizerConfig
from lmtool.resolver.schema.use import InspectWordConfig as InspectWordConfig
from lmtool.resolver.schema.use import PredictConfig as PredictConfig
from lmtool.resolver.schema.use import ProbeConfig as ProbeConfig
from lmtool.resolver.schema.use import UseConfig as UseConfig
from lmtool.runs.identity import BUDGETS
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, Parallel, ScheduleConfig
from lmtool.tuning.configs import TuningConfig

_START = (
    "give checkpoint=hf://google-bert/bert-base-uncased or others of the hub, checkpoint=runs/NAME (a run of lmtool "
    "pretrain), or model=bert_tiny for random weights; a task's data are read from task.path=FOLDER"
)
SHORTEST = 8
"""The least that max_length may be."""
_TOKENIZER = ("checkpoint", "teacher", "model.recipe.tokenizer")
_FROM_CHECKPOINT = Auto(("checkpoint",), hint=_START, agrees=True)


class RunConfig(CommandConfig):
    """The keys that every training command shares."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        ("schedule.warmup_steps", "schedule.warmup_fraction"),
        ("schedule.decay_steps", "schedule.decay_fraction"),
    )
    overlays: ClassVar[tuple[str, ...]] = ("experiment", "debug", "sweep")
    default_budget: ClassVar[tuple[str, float]]
    """A key of BUDGETS that may be `auto`, and what it is then where no other budget is given."""

    name: str | None = Field(
        None,
        description="Stable name of the run: runs/NAME. The same command resumes it. Null: made from what was "
        "chosen, and a counter.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    run_dir: str | None = Field(None, description="Folder of the run; null: runs/NAME.", min_length=1)
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of every random stream: weights, order, corruption, sampling, dropout."
    )
    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=DEVICE)
    devices: int | None = Field(
        None,
        ge=1,
        description="Processes that train together, each on a device of its own (or a share of the CPU's cores). Null: "
        "those that torchrun started, else one.",
    )
    parallel: Parallel = Field(
        "ddp",
        description="How they do: ddp (each holds all weights, gradients are added up), or fsdp (each holds its rows "
        "of weights, gradients and the optimizer's state, for models that do not fit a device).",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Number format of the matrix products; weights stay fp32. auto: bf16 where the device has it, else "
        "fp32.",
    )
    max_steps: int | None = Field(
        None,
        ge=1,
        description="Stop after this many optimizer steps; whichever budget comes first ends the run. auto: 10,000 "
        "where no other budget is given.",
    )
    max_epochs: float | None = Field(
        None, gt=0, description="Stop after this many passes over the examples. auto: 3 where no other budget is given."
    )
    max_tokens: int | None = Field(None, ge=1, description="Stop after this many training tokens.")
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="Stop after this many minutes of training; the schedule's horizon is measured once and stored.",
    )
    max_flops: float | None = Field(
        None, gt=0, description="Stop after this many floating-point operations (forward and backward)."
    )
    batch_examples: int | None = Field(None, ge=1, description="Examples in a step's batch; or give batch_tokens.")
    batch_tokens: int | None = Field(
        None, ge=1, description="Maximum real tokens in a step's batch; or give batch_examples."
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens in one forward, virtual ones too, at most; a larger batch is accumulated. Null: no limit. "
        "Changes no result beyond rounding.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Keep of every layer its input alone and compute the layer again in the backward: less memory, "
        "about a third more time (Chen et al. 2016). Changes no result.",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="Compile what stands between the attentions (torch.compile, about a minute at the start). auto: on "
        "CUDA for runs estimated to take more than five minutes. Changes no result beyond rounding and dropout draws.",
    )
    max_length: int = Field(
        128, ge=SHORTEST, description="Maximum tokens per packed sequence; longer texts are cut or split."
    )
    log_every: int = Field(
        10, ge=1, description="Steps between lines and rows of metrics.jsonl; a run has some fifty rows at least."
    )
    evaluate_every: int | None = Field(
        None, ge=1, description="Steps between evaluations. Null: about ten times in a run."
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints. Null: with each evaluation."
    )
    patience: int | None = Field(
        None, ge=1, description="Stop early after this many evaluations without a better score. Null: never."
    )
    checkpoint: str | None = Field(
        None,
        description="Weights to start from: a run or checkpoint folder, a published folder, hf://org/name@revision, or "
        "none for random ones. Null: none.",
        min_length=1,
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="Folder of the token stores, shared by all runs.", min_length=1
    )
    offline: bool = Field(False, description="Open no network connection.")
    optimizer: Annotated[OptimizerConfig, Choice("optimizer")] = Field(description="How the weights move.")
    schedule: Annotated[ScheduleConfig, Choice("schedule")] = Field(description="The learning rate over the steps.")
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(
        description="How text becomes tokens; auto: the checkpoint's, else the teacher's, else the kind the model "
        "names, trained on the run's text."
    )
    model: Annotated[ModelConfig, Choice("model")] = Field(
        description="The architecture; auto: the checkpoint's, in pretraining without one bert."
    )
    distill: Annotated[DistillConfig, Choice("distill")] = Field(
        NoDistillConfig(), description="What is learned from another model, or from the model itself."
    )
    branch: str | None = Field(
        None,
        description="A run and a step of it, RUN@STEP (or @last, @best): a new run takes weights, optimizer, step and "
        "place in the data from there, and everything else but schedule and budgets. Null: none.",
        min_length=1,
    )
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        2, description="Newest checkpoints that stay, beside the best; all: every one, for branches from any of them."
    )
    keep_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints that are saved and stay whatever keep is. Null: none."
    )
    logger: Annotated[dict[str, TrackerConfig], Several("logger")] = Field(
        {}, description="Trackers that show the run elsewhere, beside the files in its folder: none, one or several."
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A budget that is `auto` ends no run that has another one."""
        key, default = cls.default_budget
        limited = any(data.get(other) is not None for other in BUDGETS - {key})
        return {**data, key: None if limited else default} if data.get(key) == AUTO else data

    @property
    def exits(self) -> tuple[int, ...]:
        """The layers behind which the model has early exits."""
        return self.distill.exit_layers(self.model)


class PretrainConfig(RunConfig):
    """`lmtool pretrain`."""

    tuned_by: ClassVar[None] = None
    default_budget: ClassVar[tuple[str, float]] = ("max_steps", 10_000)

    auto: ClassVar[dict[str, Auto]] = {
        "model": Auto(("checkpoint", {"name": "bert"}), agrees=True),
        "tokenizer": Auto(_TOKENIZER, hint="give tokenizer=NAME", agrees=True),
        "objective": Auto(("model.recipe.pretrain.objective",), hint="give objective=NAME"),
        "optimizer": Auto(("model.recipe.pretrain.optimizer",)),
        "schedule": Auto(("model.recipe.pretrain.schedule",)),
    }

    data: Annotated[DataConfig, Choice("data")] = Field(description="The text to learn from.")
    objective: Annotated[ObjectiveConfig, Choice("objective")] = Field(
        description="What is learned from it; auto: the published one of the model."
    )
    phases: tuple[dict[str, Any], ...] = Field(
        (),
        description="Parts of the run, each with its `share` of the budget and the keys that differ in it: max_length, "
        "batch_examples, batch_tokens, micro_batch_tokens, data, optimizer.lr, and of the objective what shapes "
        "examples. Empty: one.",
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Phases have sections in the place of dotted keys, and each its share."""
        data = super().filled(data)
        return {**data, "phases": normalised(data["phases"])} if "phases" in data else data

    @classmethod
    def variants(cls, data: dict[str, Any]) -> Iterator[Variant]:
        """The configuration of each phase."""
        return variants(data)

    @property
    def forms(self) -> tuple[PretrainConfig, ...]:
        """The configuration of each phase; of a run without phases its own."""
        data = json.loads(self.model_dump_json())
        phases = [PretrainConfig.model_validate_json(json.dumps(overridden(data, phase))) for phase in self.phases]
        return tuple(phases) or (self,)

    @property
    def last(self) -> PretrainConfig:
        """The form of the last phase, in which held-out text is scored."""
        return self.forms[-1]

    @property
    def learns(self) -> ObjectiveConfig:
        """The section of what is learned."""
        return self.objective


class FinetuneConfig(RunConfig):
    """`lmtool finetune`."""

    default_budget: ClassVar[tuple[str, float]] = ("max_epochs", 3.0)

    auto: ClassVar[dict[str, Auto]] = {
        "model": _FROM_CHECKPOINT,
        "tokenizer": Auto(_TOKENIZER, hint="give tokenizer=NAME", agrees=True),
        "optimizer": Auto(("tuning.recipe.optimizer", "model.recipe.finetune.optimizer")),
        "schedule": Auto(("tuning.recipe.schedule", "model.recipe.finetune.schedule")),
    }

    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="What is learned, and from which labelled data."
    )
    tuning: Annotated[TuningConfig, Choice("tuning")] = Field(description="Which parameters learn.")
    forgetting: str | None = Field(
        None,
        description="Held-out text, a file, a folder or a glob pattern: the loss of the checkpoint's pretraining on it "
        "is measured before and after, and how far the weights move. Null: neither.",
        min_length=1,
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A null max_length is that of the task's kind, as far as the model has positions."""
        data = super().filled(data)
        if data.get("max_length", 0) is not None:
            return data
        task, model = data.get("task"), data.get("model")
        entry = lookup("task", str(task.get("kind"))) if isinstance(task, dict) else None
        kind: Any = entry.config if entry is not None else TaskConfig
        length = kind.longest(task if isinstance(task, dict) else {})
        positions = model.get("max_positions") if isinstance(model, dict) else None
        if not isinstance(positions, int):
            return {**data, "max_length": length}
        return {**data, "max_length": min(length, max(positions - _positions_taken(data), SHORTEST))}

    @property
    def learns(self) -> TaskConfig:
        """The section of what is learned."""
        return self.task

    @property
    def tuned_by(self) -> TuningConfig:
        """The section of the method."""
        return self.tuning


def _positions_taken(data: dict[str, Any]) -> int:
    """Positions that the tuning method takes of the model's, where both sections are sound."""
    try:
        tuning, model = (Choice(key).validate(data.get(key)) for key in ("tuning", "model"))
    except ValidationError:
        return 0
    if not (isinstance(tuning, TuningConfig) and isinstance(model, ModelConfig)):
        return 0
    return tuning.reserved_positions(model)


class TokenizerCommandConfig(CommandConfig):
    """`lmtool tokenizer`: train a vocabulary on text."""

    data: Annotated[DataConfig, Choice("data")] = Field(description="The text to learn from.")
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(description="The kind of tokenizer.")
    output: str = Field(description="Folder that is written: tokenizer.json and its companions.", min_length=1)
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the split into training and validation text.")
    cache_dir: str = Field("~/.cache/lmtool", description="Folder of caches, shared by all runs.", min_length=1)
    offline: bool = Field(False, description="Open no network connection.")


class TransferConfig(CommandConfig):
    """The keys of the commands that take weights from one format to another."""

    checkpoint: str = Field(
        description="The weights to take: a run or checkpoint folder, a published folder, or hf://org/name@revision.",
        min_length=1,
    )
    output: str = Field(description="Folder that is written; a new one.", min_length=1)
    offline: bool = Field(False, description="Open no network connection.")


class ExportConfig(TransferConfig):
    """`lmtool export`: a folder that transformers loads; of a tuned run also what was tuned alone."""

    format: Literal["transformers", "delta", "peft", "vectors"] = Field(
        "transformers",
        description="transformers: complete weights, with those that a tuning method added merged into them. delta: of "
        "a tuned run what its base lacks, without the optimizer's state, for lmtool. peft: the same as PEFT reads it. "
        "vectors: of model=word_vectors the words and their vectors, as text.",
    )


class ImportConfig(TransferConfig):
    """`lmtool import`: a checkpoint of lmtool from a published folder, from an adapter of PEFT, or from a text file of
    word vectors; or from any pretrained checkpoint with another vocabulary, or in another family."""

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("tokenizer", "model")

    model: str | None = Field(
        None,
        description="Family that takes over the checkpoint's weights, where it computes with the same blocks. Null: "
        "its own.",
        min_length=1,
    )

    tokenizer: str | None = Field(
        None,
        description="Folder of a tokenizer that replaces the checkpoint's: of `lmtool tokenizer`, of a run, or "
        "hf://org/name@revision. Null: the checkpoint's stays.",
        min_length=1,
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None,
        description="Text on which the loss before and after is measured. Null: the held-out text that the run was "
        "pretrained on; of a published folder that of data=pydocs.",
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="Folder of the token stores, shared by all runs.", min_length=1
    )
