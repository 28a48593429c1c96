"""The configuration classes of the training and conversion commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from lmtool.config.auto import AUTO, Auto
from lmtool.config.base import DEVICE, CommandConfig, JsonObject, Variant
from lmtool.config.tables import Choice, Several, lookup
from lmtool.data.configs import DataConfig
from lmtool.distillation.configs import DistillConfig, NoDistillConfig
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.reporting.trackers.base import TrackerConfig
from lmtool.resolver.schema.phases import normalize, overridden, variants
from lmtool.runs.identity import BUDGETS
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, Parallel, ScheduleConfig
from lmtool.tuning.configs import TuningConfig

_START = (
    "set checkpoint=hf://google-bert/bert-base-uncased or others of the hub, checkpoint=runs/NAME (a run of lmtool "
    "pretrain), or model=bert_tiny for random weights; a task's data are read from task.path=FOLDER"
)
SHORTEST = 8
"""Minimum of max_length."""
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
    """A key of BUDGETS that may be `auto`, and its value then if no other budget is set."""

    name: str | None = Field(
        None,
        description="run name: runs/NAME; the same command resumes the run; null: generated",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    run_dir: str | None = Field(None, description="folder of the run; null: runs/NAME", min_length=1)
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed for all randomness: weights, data order, corruption, sampling, dropout"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N", pattern=DEVICE)
    devices: int | None = Field(
        None,
        ge=1,
        description="number of training processes, one per device; null: as started by torchrun, else one. On a CPU "
        "the processes share its cores",
    )
    parallel: Parallel = Field(
        "ddp",
        description="ddp: every process holds all weights; fsdp: weights, gradients and optimizer are sharded. fsdp "
        "is for models that do not fit on one device",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto (bf16 if the device supports it), fp32, bf16, fp16"
    )
    max_steps: int | None = Field(
        None, ge=1, description="maximum number of steps; the first budget reached ends the run; null: no limit"
    )
    max_epochs: float | None = Field(None, gt=0, description="maximum passes over the training examples")
    max_tokens: int | None = Field(None, ge=1, description="maximum number of training tokens")
    max_minutes: float | None = Field(None, gt=0, description="maximum minutes of training")
    max_flops: float | None = Field(None, gt=0, description="maximum floating-point operations, forward and backward")
    batch_examples: int | None = Field(None, ge=1, description="examples per step; or use batch_tokens")
    batch_tokens: int | None = Field(None, ge=1, description="maximum number of real tokens (without padding) per step")
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens per forward pass, virtual tokens included; larger batches are accumulated",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="recompute layers in the backward pass: less memory, about a third more time. Only the input of "
        "each layer is saved (Chen et al. 2016); the results stay the same",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="torch.compile of all but attention: true, false; auto: on CUDA, for more than five minutes. "
        "Compilation takes about a minute; results change only by rounding and dropout masks",
    )
    max_length: int = Field(128, ge=SHORTEST, description="maximum tokens per sequence")
    log_every: int = Field(
        10, ge=1, description="maximum steps between rows in metrics.jsonl; a run has at least about fifty rows"
    )
    evaluate_every: int | None = Field(None, ge=1, description="steps between evaluations; null: about ten per run")
    checkpoint_every: int | None = Field(
        None, ge=1, description="steps between checkpoints; null: one at each evaluation"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after this many evaluations without improvement; null: never"
    )
    checkpoint: str | None = Field(
        None,
        description="initial weights: a run, a published folder, hf://org/name@revision; none: random",
        min_length=1,
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="folder of the token stores, shared by all runs", min_length=1
    )
    offline: bool = Field(False, description="open no network connection")
    optimizer: Annotated[OptimizerConfig, Choice("optimizer")] = Field(
        description="update rule; auto: as in the model's paper"
    )
    schedule: Annotated[ScheduleConfig, Choice("schedule")] = Field(
        description="learning rate schedule; auto: as in the model's paper"
    )
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(
        description="auto: the checkpoint's, else the teacher's, else trained on the run's text"
    )
    model: Annotated[ModelConfig, Choice("model")] = Field(
        description="architecture and size; auto: the checkpoint's, else bert; `lmtool list model`"
    )
    distill: Annotated[DistillConfig, Choice("distill")] = Field(
        NoDistillConfig(), description="what the model learns from other models: soft, hard, ...; `lmtool list distill`"
    )
    branch: str | None = Field(
        None,
        description="RUN@STEP: start a new run from there, with its optimizer and data position; null: none. @last "
        "and @best work too; everything but the schedule and the budgets stays as it was",
        min_length=1,
    )
    weight_average: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, which is evaluated and saved instead of them; null: "
        "none. 0.999 is usual; smaller in the first steps, where it is (1 + step) / (10 + step)",
    )
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        2, description="most recent checkpoints to keep, besides the best; all: every checkpoint"
    )
    keep_every: int | None = Field(
        None, ge=1, description="steps between checkpoints that are kept regardless of keep; null: none"
    )
    logger: Annotated[dict[str, TrackerConfig], Several("logger")] = Field(
        {}, description="trackers besides the local files: wandb, tensorboard, or [wandb,tensorboard]"
    )

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Resolves a budget that is `auto`: no limit if another budget is set."""
        key, default = cls.default_budget
        limited = any(data.get(other) is not None for other in BUDGETS - {key})
        return {**data, key: None if limited else default} if data.get(key) == AUTO else data

    @property
    def exits(self) -> tuple[int, ...]:
        """The layers that have early exits."""
        return self.distill.exit_layers(self.model)


class PretrainConfig(RunConfig):
    """`lmtool pretrain`."""

    descriptions: ClassVar[dict[str, str]] = {
        "max_steps": "10000 if no other budget is set; the first budget reached ends the run; null: no limit"
    }

    tuning_config: ClassVar[None] = None
    default_budget: ClassVar[tuple[str, float]] = ("max_steps", 10_000)

    auto: ClassVar[dict[str, Auto]] = {
        "model": Auto(("checkpoint", {"name": "bert"}), agrees=True),
        "tokenizer": Auto(_TOKENIZER, hint="set tokenizer=NAME", agrees=True),
        "objective": Auto(("model.recipe.pretrain.objective",), hint="set objective=NAME"),
        "optimizer": Auto(("model.recipe.pretrain.optimizer",)),
        "schedule": Auto(("model.recipe.pretrain.schedule",)),
    }

    data: Annotated[DataConfig, Choice("data")] = Field(
        description="training text; your own text: data=text data.path=FOLDER"
    )
    objective: Annotated[ObjectiveConfig, Choice("objective")] = Field(
        description="training objective; auto: the one that the model was published with"
    )
    phases: tuple[JsonObject, ...] = Field(
        (),
        description="phases of training: [{share: 0.9, max_length: 128}, {max_length: 512, batch_tokens: 8192}]. Each "
        "phase has a `share` of the budget and the keys that change: max_length, batch_examples, batch_tokens, "
        "micro_batch_tokens, data, optimizer.lr, and the keys of the objective that shape examples",
    )

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Converts the dotted keys of phases to sections, and fill in the share of the last one."""
        data = super().filled(data)
        return {**data, "phases": normalize(data["phases"])} if "phases" in data else data

    @classmethod
    def variants(cls, data: JsonObject) -> Iterator[Variant]:
        """Returns the configuration of each phase."""
        return variants(data)

    @property
    def phase_configs(self) -> tuple[PretrainConfig, ...]:
        """The configuration of each phase; without phases, that of the run."""
        data = json.loads(self.model_dump_json())
        phases = [PretrainConfig.model_validate_json(json.dumps(overridden(data, phase))) for phase in self.phases]
        return tuple(phases) or (self,)

    @property
    def last(self) -> PretrainConfig:
        """The configuration of the last phase, in which held-out text is scored."""
        return self.phase_configs[-1]

    @property
    def learner_config(self) -> ObjectiveConfig:
        """The section that defines the objective or the task."""
        return self.objective


class FinetuneConfig(RunConfig):
    """`lmtool finetune`."""

    descriptions: ClassVar[dict[str, str]] = {
        "model": "auto: the checkpoint's; model=bert_tiny with checkpoint=none: random weights",
        "tokenizer": "auto: the checkpoint's, else the teacher's, else trained on the task's text",
        "optimizer": "update rule; auto: AdamW at 5e-5, more for narrow models, or the method's own",
        "schedule": "learning rate schedule; auto: 10% warmup and linear decay, or the model's or method's own",
        "max_epochs": "maximum passes over the training examples; 3 if no other budget is set",
        "max_length": "maximum tokens per sequence; longer texts are truncated and counted; null: 128, or the task's",
    }

    default_budget: ClassVar[tuple[str, float]] = ("max_epochs", 3.0)

    auto: ClassVar[dict[str, Auto]] = {
        "model": _FROM_CHECKPOINT,
        "tokenizer": Auto(_TOKENIZER, hint="set tokenizer=NAME", agrees=True),
        "optimizer": Auto(("tuning.recipe.optimizer", "model.recipe.finetune.optimizer")),
        "schedule": Auto(("tuning.recipe.schedule", "model.recipe.finetune.schedule")),
    }

    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="required, task=NAME; `lmtool list task`"
    )
    tuning: Annotated[TuningConfig, Choice("tuning")] = Field(
        description="which parameters are trained; `lmtool list tuning`"
    )
    forgetting: str | None = Field(
        None,
        description="held-out text on which the pretraining loss is measured before and after; null: off. A file, "
        "folder or glob pattern; also measures how far the weights move",
        min_length=1,
    )

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Resolves a null max_length: the default of the task's kind, but at most the positions of the model."""
        data = super().filled(data)
        if data.get("max_length", 0) is not None:
            return data
        task, model = data.get("task"), data.get("model")
        entry = lookup("task", str(task.get("kind"))) if isinstance(task, dict) else None
        kind: Any = entry.config if entry is not None else TaskConfig
        length = kind.default_length(task if isinstance(task, dict) else {})
        positions = model.get("max_positions") if isinstance(model, dict) else None
        if not isinstance(positions, int):
            return {**data, "max_length": length}
        return {**data, "max_length": min(length, max(positions - _positions_taken(data), SHORTEST))}

    @property
    def learner_config(self) -> TaskConfig:
        """The section that defines the objective or the task."""
        return self.task

    @property
    def tuning_config(self) -> TuningConfig:
        """The section of the tuning method."""
        return self.tuning


def _positions_taken(data: JsonObject) -> int:
    """Returns the positions that the tuning method reserves, if both sections are valid."""
    try:
        tuning, model = (Choice(key).validate(data.get(key)) for key in ("tuning", "model"))
    except ValidationError:
        return 0
    if not (isinstance(tuning, TuningConfig) and isinstance(model, ModelConfig)):
        return 0
    return tuning.reserved_positions(model)


class TokenizerCommandConfig(CommandConfig):
    """`lmtool tokenizer`: train a vocabulary on text."""

    data: Annotated[DataConfig, Choice("data")] = Field(description="training text")
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(
        description="kind of tokenizer; `lmtool list tokenizer`"
    )
    output: str = Field(description="output folder: tokenizer.json and related files", min_length=1)
    seed: int = Field(0, ge=0, lt=2**63, description="seed for the split into training and validation text")
    cache_dir: str = Field("~/.cache/lmtool", description="folder of caches, shared by all runs", min_length=1)
    offline: bool = Field(False, description="open no network connection")


class TransferConfig(CommandConfig):
    """The keys of commands that convert weights from one format to another."""

    checkpoint: str = Field(
        description="a run or checkpoint folder, a published folder, or hf://org/name@revision", min_length=1
    )
    output: str = Field(description="output folder, which must not exist yet", min_length=1)
    offline: bool = Field(False, description="open no network connection")


class ExportConfig(TransferConfig):
    """`lmtool export`: a folder for transformers, or the tuned weights only."""

    format: Literal["transformers", "delta", "peft", "vectors"] = Field(
        "transformers",
        description="transformers: complete weights; for a tuned run without its base: delta (lmtool), peft; for "
        "word_vectors: vectors, a text file of words and their vectors. transformers: weights added by a tuning "
        "method are merged. delta: what the base lacks, without optimizer state. peft: the same, as PEFT reads it",
    )


class ImportConfig(TransferConfig):
    """`lmtool import`: a checkpoint from a Hugging Face folder, a PEFT adapter or a text file of word vectors; or a
    pretrained checkpoint with another vocabulary or in another family."""

    descriptions: ClassVar[dict[str, str]] = {
        "checkpoint": "folder with config.json and model.safetensors, hf://org/name@revision, a run, or vectors"
    }

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("tokenizer", "model")

    model: str | None = Field(
        None,
        description="family that receives the weights, if it has the same blocks; null: the checkpoint's own",
        min_length=1,
    )

    tokenizer: str | None = Field(
        None,
        description="new tokenizer for the checkpoint: a folder, a run or hf://org/name; null: unchanged. From "
        "`lmtool tokenizer`, a run or the hub",
        min_length=1,
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None, description="text for the loss before and after; null: the run's held-out text, else data=pydocs"
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="folder of the token stores, shared by all runs", min_length=1
    )
