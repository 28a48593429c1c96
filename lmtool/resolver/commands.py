"""The configuration classes of all commands. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationError

from lmtool.config.base import Auto, CommandConfig, Config, JsonObject, Variant
from lmtool.config.decode import AUTO, decode
from lmtool.config.messages import plain_value
from lmtool.config.registry import Choice, Several, chosen_class
from lmtool.data.configs import SHORTEST, DataConfig
from lmtool.distillation.configs.base import DistillConfig, NoDistillConfig
from lmtool.errors import ConfigError, UserError
from lmtool.learners.configs import ObjectiveConfig
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.models.configs import ModelConfig
from lmtool.reporting.trackers.base import TrackerConfig
from lmtool.runs.files import output_errors
from lmtool.runs.identity import BUDGETS
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, Parallel, ScheduleConfig
from lmtool.training.devices import device_of
from lmtool.training.phases import normalize_phases, phase_variants, with_phase
from lmtool.tuning.configs.base import TuningConfig

_START = (
    "set checkpoint=hf://google-bert/bert-base-uncased or others of the hub, checkpoint=runs/NAME (a run of lmtool "
    "pretrain), or model=bert_tiny for random weights; a task's data are read from task.path=FOLDER"
)
_TOKENIZER = Auto(("checkpoint", "teacher", "model.recipe.tokenizer"), hint="set tokenizer=NAME", agrees=True)


_CHECKPOINT = "a run or checkpoint folder, a published folder, or hf://org/name@revision"
_DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"

# Fields of several commands.
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Device = Annotated[str, Field(description="auto, cpu, cuda or cuda:N", pattern=_DEVICE)]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    Field(description="auto (bf16 if the device supports it), fp32, bf16, fp16"),
]
CacheDir = Annotated[str, Field(description="folder of the token stores, shared by all runs", min_length=1)]
Offline = Annotated[bool, Field(description="open no network connection")]
Checkpoint = Annotated[str, Field(description=_CHECKPOINT, min_length=1)]
Checkpoints = Annotated[tuple[str, ...], Field(description=f"{_CHECKPOINT}; or a list: [a,b]", min_length=1)]
OptionalTask = Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)]
OptionalText = Annotated[DataConfig | None, Choice("data", optional=True)]


class RunConfig(CommandConfig):
    """The keys that every training command shares."""

    alternatives = (
        ("schedule.warmup_steps", "schedule.warmup_fraction"),
        ("schedule.decay_steps", "schedule.decay_fraction"),
    )
    overlays = ("experiment", "debug", "sweep")
    default_budget: ClassVar[tuple[str, float]]
    """A key of BUDGETS that may be `auto`, and its value then if no other budget is set."""

    name: str | None = Field(
        None,
        description="run name: runs/NAME; the same command resumes the run; null: generated",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    run_dir: Text | None = Field(None, description="folder of the run; null: runs/NAME")
    seed: Seed = Field(0, description="seed for all randomness: weights, data order, corruption, sampling, dropout")
    device: Device = "auto"
    devices: Count | None = Field(
        None,
        description="number of training processes, one per device; null: as started by torchrun, else one. On a CPU "
        "the processes share its cores",
    )
    parallel: Parallel = Field(
        "ddp",
        description="ddp: every process holds all weights; fsdp: weights, gradients and optimizer are sharded. fsdp "
        "is for models that do not fit on one device",
    )
    precision: Precision = "auto"
    max_steps: Count | None = Field(
        None, description="maximum number of steps; the first budget reached ends the run; null: no limit"
    )
    max_epochs: Amount | None = Field(None, description="maximum passes over the training examples")
    max_tokens: Count | None = Field(None, description="maximum number of training tokens")
    max_words: Count | None = Field(
        None, description="maximum words of training text (as wc -w), repeats included; pretrain"
    )
    max_minutes: Amount | None = Field(None, description="maximum minutes of training; evaluations are not counted")
    max_flops: Amount | None = Field(
        None,
        description="maximum floating-point operations of the matrix products in training, forward and backward; "
        "heads are counted, lookups of embeddings are not, and neither are evaluations",
    )
    batch_examples: Count | None = Field(None, description="examples per step; or use batch_tokens")
    batch_tokens: Count | None = Field(None, description="maximum number of real tokens (without padding) per step")
    micro_batch_tokens: Count | None = Field(
        None, description="maximum tokens per forward pass, virtual tokens included; larger batches are accumulated"
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
    log_every: Count = Field(
        10, description="maximum steps between rows in metrics.jsonl; a run has at least about fifty rows"
    )
    evaluate_every: Count | None = Field(
        None, description="steps between evaluations; null: about ten per run, fewer if it is short"
    )
    evaluate_rows: Count | Literal["auto", "all"] = Field(
        "auto",
        description="size of the fixed sample of rows (of a text: examples) that evaluations during training read; "
        "auto: 256, or more if all evaluations take at most a sixth of the time; all. The final scores use all rows",
    )
    checkpoint_every: Count | None = Field(None, description="steps between checkpoints; null: one at each evaluation")
    checkpoint_at: tuple[int | str, ...] | None = Field(
        None,
        description="amounts of text at which a checkpoint is kept for good: [1M,2M,5M] tokens (K, M, B); words: "
        "[10Mw]. RUN@* scores them all, RUN@1M one of them",
    )
    patience: Count | None = Field(
        None, description="stop after this many evaluations without improvement; null: never"
    )
    checkpoint: Text | None = Field(
        None, description="initial weights: a run, a published folder, hf://org/name@revision; none: random"
    )
    cache_dir: CacheDir = "~/.cache/lmtool"
    offline: Offline = False
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
    branch: Text | None = Field(
        None,
        description="RUN@STEP: start a new run from there, with its optimizer and data position; null: none. @last "
        "and @best work too; everything but the schedule and the budgets stays as it was",
    )
    weight_average: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, which is evaluated and saved instead of them; null: "
        "none. 0.999 is usual; smaller in the first steps, where it is (1 + step) / (10 + step)",
    )
    keep: Count | Literal["all"] = Field(
        2, description="most recent checkpoints to keep, besides the best; all: every checkpoint"
    )
    keep_every: Count | None = Field(
        None, description="steps between checkpoints that are kept regardless of keep; null: none"
    )
    keep_optimizer: Literal["last", "all", "none"] = Field(
        "last",
        description="checkpoints of a finished run that keep the optimizer's state, two thirds of their size: last, "
        "from which a larger budget resumes; all; none. Those of keep=all and keep_every= keep it unless none",
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
        return self.distill.exit_layers(self.model)

    @property
    def scaled_optimizer(self) -> OptimizerConfig:
        """The optimizer with the learning rate for the run's batch."""
        return self.optimizer.scaled(self.batch_examples, self.batch_tokens)


class PretrainConfig(RunConfig):
    """`lmtool pretrain`."""

    descriptions = {
        "max_steps": "10000 if no other budget is set; the first budget reached ends the run; null: no limit"
    }

    tuning_config: ClassVar[None] = None
    default_budget = ("max_steps", 10_000)

    auto = {
        "model": Auto(("checkpoint", {"name": "bert"}), agrees=True),
        "tokenizer": _TOKENIZER,
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
    minimal_pairs: Text | None = Field(
        None,
        description="a folder or a file of minimal pairs, of which about 500 are scored at every evaluation; null: "
        "none. Columns as in task=blimp",
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
        return {**data, "phases": normalize_phases(data["phases"])} if "phases" in data else data

    @classmethod
    def variants(cls, data: JsonObject) -> Iterator[Variant]:
        return phase_variants(cls, data)

    @cached_property
    def phase_configs(self) -> tuple[PretrainConfig, ...]:
        data = json.loads(self.model_dump_json()) if self.phases else {}
        phases = [PretrainConfig.model_validate_json(json.dumps(with_phase(data, phase))) for phase in self.phases]
        return tuple(phases) or (self,)

    def model_copy(self, **changes: Any) -> Self:
        copied = super().model_copy(**changes)
        copied.__dict__.pop("phase_configs", None)
        return copied

    @property
    def last(self) -> PretrainConfig:
        return self.phase_configs[-1]

    @property
    def learner_config(self) -> ObjectiveConfig:
        return self.objective


class FinetuneConfig(RunConfig):
    """`lmtool finetune`."""

    descriptions = {
        "model": "auto: the checkpoint's; model=bert_tiny with checkpoint=none: random weights",
        "tokenizer": "auto: the checkpoint's, else the teacher's, else trained on the task's text",
        "optimizer": "update rule; auto: AdamW at 5e-5, more for narrow models, or the method's own",
        "schedule": "learning rate schedule; auto: 10% warmup and linear decay, or the model's or method's own",
        "max_epochs": "maximum passes over the training examples; 3 if no other budget is set",
        "max_length": "maximum tokens per sequence; longer texts are truncated and counted; null: 128, or the task's",
    }

    default_budget = ("max_epochs", 3.0)

    auto = {
        "model": Auto(("checkpoint",), hint=_START, agrees=True),
        "tokenizer": _TOKENIZER,
        "optimizer": Auto(("tuning.recipe.optimizer", "model.recipe.finetune.optimizer")),
        "schedule": Auto(("tuning.recipe.schedule", "model.recipe.finetune.schedule")),
    }

    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="required, task=NAME; `lmtool list task`"
    )
    tuning: Annotated[TuningConfig, Choice("tuning")] = Field(
        description="which parameters are trained; `lmtool list tuning`"
    )
    forgetting: Text | None = Field(
        None,
        description="held-out text on which the pretraining loss is measured before and after; null: off. A file, "
        "folder or glob pattern; also measures how far the weights move",
    )

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Resolves null values of the task, and a null max_length: the default of the task's kind, but at most the
        positions of the model."""
        data = super().filled(data)
        model, task, epochs = data.get("model"), data.get("task"), data.get("max_epochs")
        task = dict(task) if isinstance(task, dict) else {}
        if "auxiliary_lm" in task and task["auxiliary_lm"] is None:
            family: Any = chosen_class(model, Choice("model")) or ModelConfig
            by_text = task.get("head") in ("text_to_text", "prompt") or task.get("domain") is not None
            task["auxiliary_lm"] = 0.0 if by_text else family.finetuning_lm_weight
        annealed = task.get("sampling") == "annealed" and task.get("annealing_epochs") is None
        if annealed and isinstance(epochs, int | float):
            task["annealing_epochs"] = math.ceil(epochs)
        data = {**data, "task": task} if task else data
        if data.get("max_length", 0) is not None:
            return data
        kind: Any = chosen_class(task, Choice("task", key="kind")) or TaskConfig
        length = kind.default_length(task)
        positions = model.get("max_positions") if isinstance(model, dict) else None
        if not isinstance(positions, int):
            return {**data, "max_length": length}
        return {**data, "max_length": min(length, max(positions - _positions_taken(data), SHORTEST))}

    @property
    def learner_config(self) -> TaskConfig:
        return self.task

    @property
    def tuning_config(self) -> TuningConfig:
        return self.tuning


def _positions_taken(data: JsonObject) -> int:
    try:
        tuning, model = (Choice(key).validate(data.get(key)) for key in ("tuning", "model"))
    except ValidationError:
        return 0
    if isinstance(tuning, TuningConfig) and isinstance(model, ModelConfig):
        return tuning.reserved_positions(model)
    return 0


class TokenizerCommandConfig(CommandConfig):
    """`lmtool tokenizer`: train a vocabulary on text."""

    data: Annotated[DataConfig, Choice("data")] = Field(description="training text")
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(
        description="kind of tokenizer; `lmtool list tokenizer`"
    )
    output: Text = Field(description="output folder: tokenizer.json and related files")
    seed: Seed = Field(0, description="seed for the split into training and validation text")
    cache_dir: Text = Field("~/.cache/lmtool", description="folder of caches, shared by all runs")
    offline: Offline = False


class TransferConfig(CommandConfig):
    """The keys of commands that convert weights from one format to another."""

    checkpoint: Checkpoint
    output: Text = Field(description="output folder, which must not exist yet")
    offline: Offline = False


class ExportConfig(TransferConfig):
    """`lmtool export`: a folder for transformers, or the tuned weights only."""

    format: Literal["transformers", "delta", "peft", "vectors"] = Field(
        "transformers",
        description="transformers: complete weights; for a tuned run without its base: delta (lmtool), peft; for "
        "word_vectors: vectors, a text file of words and their vectors. transformers: weights added by a tuning "
        "method are merged. delta: what the base lacks, without optimizer state. peft: the same, as PEFT reads it",
    )


class ImportConfig(TransferConfig):
    """`lmtool import`: a checkpoint from a Hugging Face folder, a PEFT adapter, word vectors or ELMo's weights; or a
    pretrained checkpoint with another vocabulary or in another family."""

    descriptions = {
        "checkpoint": "folder of published weights, hf://org/name@revision, an adapter, a run, or word vectors"
    }

    starts_with_checkpoint = False
    verbatim = ("tokenizer", "model")

    model: Text | None = Field(
        None, description="family that receives the weights, if it has the same blocks; null: the checkpoint's own"
    )
    tokenizer: Text | None = Field(
        None,
        description="new tokenizer for the checkpoint: a folder, a run or hf://org/name; null: unchanged. From "
        "`lmtool tokenizer`, a run or the hub",
    )
    data: OptionalText = Field(
        None, description="text for the loss before and after; null: the run's held-out text, else data=pydocs"
    )
    cache_dir: CacheDir = "~/.cache/lmtool"


class MachineConfig(CommandConfig):
    """The keys that set where and how a trained checkpoint runs."""

    device: Device = "auto"
    precision: Precision = "auto"
    batch_tokens: Count = Field(8192, description="maximum number of real tokens (without padding) in one forward pass")
    cache_dir: CacheDir = "~/.cache/lmtool"
    offline: Offline = False


class UseConfig(MachineConfig):
    """The keys of the commands that use a trained checkpoint."""

    checkpoint: Checkpoint
    output: Text | None = Field(None, description="output file; null: the screen only")


class TaskUseConfig(UseConfig):
    """The keys of commands that predict rows of a task."""

    exit: Count | None = Field(
        None, description="layer at which all rows exit a model with early exits (distill=self); null: the last layer"
    )
    exit_entropy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="each row exits where the entropy is at most this fraction of the maximum (0 to 1). 0: only if "
        "the model is certain; 1: always; null: no early exit",
    )


class EvaluateConfig(TaskUseConfig):
    """`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind."""

    descriptions = {"output": "output file of the predictions (.jsonl); null: the screen only"}

    auto = {
        "task": Auto(
            ("checkpoint",),
            hint="train it for the task first (lmtool finetune task=NAME checkpoint=RUN), or set data= to score text",
            implied=True,
        ),
        "data": Auto(("checkpoint",), hint="set task.path=: the checkpoint was trained for a task", implied=True),
    }

    alternatives = (("lengths", "max_length"), ("lengths", "stride"), ("lengths", "against"), ("lengths", "output"))

    against: Text | None = Field(
        None,
        description="another checkpoint, scored on the same rows or documents; reports the difference and its interval",
    )
    report: Text | None = Field(
        None,
        description="output folder: evaluation.json, predictions.jsonl and plots; of several runs seeds.csv and .html",
    )
    task: OptionalTask = Field(None, description="null: the checkpoint's task; task.path=FILE changes its data only")
    data: OptionalText = Field(
        None, description="null: the checkpoint's held-out pretraining text; data=text data.path=FOLDER: all of it"
    )
    max_length: int | None = Field(
        None, ge=8, description="tokens per window that a language model reads; null: as in training"
    )
    lengths: tuple[Annotated[int, Field(ge=8)], ...] | None = Field(
        None,
        description="several values of max_length for one table, which compares them with the length of training; for "
        "causal language models. Rotary positions are also scored with linear interpolation (Chen et al. 2023), "
        "NTK-aware scaling and YaRN (Peng et al. 2023), without training",
    )
    stride: Count | None = Field(
        None,
        description="tokens between overlapping windows, for causal language models; null: no overlap. Each token is "
        "predicted once, with at least max_length - stride tokens of context",
    )
    memory_length: int | None = Field(
        None,
        ge=0,
        description="tokens in memory before a segment (models with a memory), which may be more or fewer than in "
        "training (Dai et al. 2019); null: the model's own setting",
    )
    shots: int | None = Field(
        None,
        ge=0,
        description="few-shot examples before each row: prompts task=NAME without training; null: no prompts. Brown "
        "et al. 2020",
    )
    prompt_seeds: Count = Field(3, description="random draws of few-shot examples, each in its own order")
    normalisation: Literal["none", "length", "calibrated"] = Field(
        "length",
        description="answer scores: none (summed log-probability), length (mean), calibrated (Zhao et al. 2021). "
        "calibrated: relative to the answer's probability for empty inputs (N/A, [MASK], none)",
    )


class CheckpointsConfig(CommandConfig):
    """A command that reads several checkpoints."""

    checkpoint: tuple[str, ...] = ()

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Makes a single checkpoint a list of one."""
        checkpoint = data.get("checkpoint")
        return {**data, "checkpoint": [checkpoint]} if isinstance(checkpoint, str) and checkpoint != "???" else data


class EvaluateRunsConfig(CheckpointsConfig, EvaluateConfig):
    """`lmtool evaluate`, with one checkpoint or several."""

    checkpoint: tuple[str, ...] = Field(  # type: ignore[assignment]
        min_length=1,
        description=f"{_CHECKPOINT}; or several runs, for their means over seeds: [a,b], the folder of a sweep, or a "
        "pattern (runs/gpt_*)",
    )


class AskConfig(UseConfig):
    """The keys of commands that read the user's texts."""

    verbatim: ClassVar[tuple[str, ...]] = ("text", "pair")

    text: str | None = Field(None, description="one text; or use input")
    pair: str | None = Field(None, description="second text, if the task reads pairs")
    input: Text | None = Field(
        None, description="file: one text per line (.txt), a text column or the task's (.tsv, .csv, .jsonl); -: stdin"
    )


class PredictConfig(AskConfig, TaskUseConfig):
    """`lmtool predict`: label texts, or fill their masks."""

    descriptions = {"output": "output file (.jsonl, .csv, .tsv), including the input's columns; null: the screen"}

    verbatim: ClassVar[tuple[str, ...]] = (*AskConfig.verbatim, "task")

    task: str | None = Field(
        None, description="for a checkpoint trained on several tasks: the name of the task whose head predicts"
    )
    probabilities: bool = Field(False, description="write the probabilities of all classes to the output")


class GenerateConfig(UseConfig, GenerationConfig):
    """`lmtool generate`: write text."""

    descriptions = {
        "output": "output file (.jsonl); null: the screen",
        "batch_tokens": "approximate number of tokens in the cache at a time",
    }

    verbatim = ("prompt",)

    prompt: str | None = Field(None, description="one prompt; or use input")
    input: Text | None = Field(
        None, description="file: one prompt per line (.txt), or a column of prompts (.tsv, .csv, .jsonl); -: stdin"
    )
    column: str | None = Field(
        None, description="column of the prompts in a table; null: text, or the text column of the checkpoint's task"
    )
    seed: Seed = Field(0, description="seed for sampling: the same seed gives the same text")


class EmbedConfig(AskConfig):
    """`lmtool embed`: texts as vectors of hidden states."""

    descriptions = {
        "output": "output file: .npy (one row per text), .parquet (also one row per token); null: the screen"
    }

    layers: int | Literal["last", "all", "mean"] = Field(
        "last",
        description="last, a number (0: the embedding), all, or mean (over all layers but the embedding). "
        "Encoder-decoders: layers of the encoder",
    )
    pooling: Literal["auto", "none", "first", "mean", "max", "last"] = Field(
        "auto",
        description="none (one vector per token), first, mean, max, last; auto: the checkpoint's, else mean. The "
        "folder of a sentence encoder also defines what follows the pooling",
    )


class ProbeConfig(MachineConfig, CheckpointsConfig):
    """`lmtool probe`: linear probes on every layer."""

    auto = {"data": Auto(("checkpoint",), hint="set data=text data.path=FOLDER", implied=True)}

    checkpoint: Checkpoints
    target: Literal["token", "previous", "next", "task", "evolution"] = Field(
        description="token, previous or next: the identity of each token, of the one before or after it; the name of "
        "a task, such as sst2, whose classes are probed; or evolution: mutual information and similarity of layers"
    )
    output: Text = Field("probe", description="output folder: probe.json, .png and .html")
    pooling: Literal["first", "mean", "max", "last"] = Field(
        "mean", description="vector of a text, in tasks that classify texts: first, mean, max or last"
    )
    classes: int = Field(
        1000,
        ge=2,
        description="for token targets: the most frequent types, used as classes; other positions are skipped",
    )
    examples: int = Field(10000, ge=2, description="maximum number of training tokens or texts per probe")
    held_out: int = Field(5000, ge=2, description="maximum number of tokens or texts in its test set")
    clusters: int = Field(100, ge=2, description="for target=evolution: the clusters of a layer's states (k-means)")
    max_length: int = Field(128, ge=8, description="maximum tokens per text")
    seed: Seed = Field(0, description="seed for the random weights, the samples and the held-out part")
    task: OptionalTask = Field(None, description="labeled data, for target=NAME")
    data: OptionalText = Field(
        None, description="text whose held-out documents are read; null: the first checkpoint's pretraining data"
    )


class CheckConfig(CommandConfig):
    """`lmtool check`: check a data set before training on it."""

    starts_with_checkpoint = False

    task: OptionalTask = Field(None, description="labeled data: the name of a task, or a file")
    data: OptionalText = Field(None, description="text to pretrain on")
    checkpoint: Text | None = Field(
        None, description="tokenizer that measures lengths: a run's, a folder's or `lmtool tokenizer`'s; null: words"
    )
    max_length: int = Field(128, ge=8, description="maximum tokens of a text; the number of longer texts is reported")
    near: float | None = Field(
        0.8,
        gt=0,
        lt=1,
        description="minimum Jaccard similarity of character 5-grams in near-duplicates; null: exact ones only",
    )
    listed: int = Field(20, ge=0, description="maximum number of rows listed per finding; all rows are counted")
    output: Text | None = Field(None, description="output file: every finding, as JSON")
    seed: Seed = Field(0, description="seed for the rows held out when there is no development split, and for samples")
    cache_dir: Text = Field("~/.cache/lmtool", description="folder for collected or downloaded text")
    offline: Offline = False


class DoctorConfig(CommandConfig):
    """`lmtool doctor`: what this machine can do."""

    device: Device = "auto"
    cache_dir: Text = Field("~/.cache/lmtool", description="cache folder that runs will use")
    offline: Offline = False
    trains: bool = Field(True, description="train a tiny model twice and compare the results bit by bit")


Kind = Literal["wordpiece", "bytebpe", "bpe", "sentencepiece", "word", "character"]


class InspectTokenizerConfig(CheckpointsConfig):
    """`lmtool inspect tokenizer`: one text as tokens of each type of tokenizer, side by side."""

    starts_with_checkpoint = False
    verbatim = ("text",)

    text: Text = Field(description="text to tokenize")
    checkpoint: tuple[str, ...] = Field(
        (), description="tokenizers to compare with: runs, checkpoints, published folders, hf://org/name"
    )
    kinds: tuple[Kind, ...] = Field(get_args(Kind), description="kinds of tokenizer to train; [] for none")
    vocab_size: int = Field(8192, ge=300, le=1_000_000, description="maximum vocabulary size of each")
    data: Annotated[DataConfig, Choice("data")] = Field(description="training text for the new tokenizers")
    output: Text = Field("tokenizers.html", description="output page")
    cache_dir: Text = Field("~/.cache/lmtool", description="folder for trained tokenizers")
    offline: Offline = False


class LookConfig(CommandConfig):
    """The keys that set where a checkpoint is inspected."""

    device: Device = "auto"
    offline: Offline = False


class InspectAttentionConfig(LookConfig):
    """`lmtool inspect attention`: the attention weights of each head of a checkpoint for a text."""

    verbatim = ("text",)

    precision: Precision = "auto"
    checkpoint: Checkpoint
    text: Text = Field(description="input text")
    shown: int = Field(3, ge=0, description="heads shown on the screen: those with the most concentrated attention")
    output: Text = Field("attention.html", description="output page, with all heads")


class InspectPositionsConfig(LookConfig, CheckpointsConfig):
    """`lmtool inspect positions`: the effect of each type of position encoding on the scores of equal words."""

    starts_with_checkpoint = False
    verbatim = ("text",)

    kinds: tuple[str, ...] = Field(
        ("learned", "sinusoidal", "rotary", "t5", "alibi", "shaw"),
        description="untrained kinds to show (learned ones are random); [] for none",
    )
    checkpoint: tuple[str, ...] = Field((), description="checkpoints whose trained positions are shown as well")
    length: int = Field(64, ge=2, le=512, description="number of positions")
    hidden_size: int = Field(64, ge=2, le=4096, description="width of the token vectors of untrained kinds")
    num_heads: int = Field(4, ge=1, le=64, description="attention heads of untrained kinds")
    causal: bool = Field(False, description="true: untrained kinds use causal attention")
    text: Text | None = Field(
        None, description="sentence for positions in a tree, words separated by spaces; null: an example"
    )
    heads: tuple[int, ...] | None = Field(
        None, description="the head of each word of text=, counted from 1, 0 for the root: [2,3,0]; null: an example"
    )
    output: Text = Field("positions.html", description="output page")


class DemoConfig(CommandConfig):
    """`lmtool demo`: what pretraining is worth, shown on text that every machine has."""

    starts_with_checkpoint = False

    folder: Text = Field("runs", description="folder for the runs")
    minutes: Amount = Field(2.25, description="maximum minutes of pretraining")


class CourseConfig(CommandConfig):
    """`lmtool course`: the commands of the course, and a page with their results."""

    starts_with_checkpoint = False

    topics: tuple[str, ...] = Field((), description="topics to run, by id; []: all that have not been run")
    folder: Text = Field("runs/course", description="folder of the runs, their output and the page")


class PruneConfig(CommandConfig):
    """`lmtool runs prune`: the optimizer states that finished runs do not need."""

    starts_with_checkpoint = False

    folder: Text = Field("runs", description="folder of runs, or a run")
    keep_optimizer: Literal["last", "none"] = Field(
        "last", description="last: keep those from which a larger budget resumes; none"
    )
    delete: bool = Field(False, description="remove the states; false: only list them")


class InspectWordConfig(LookConfig, CheckpointsConfig):
    """`lmtool inspect word`: one word in several sentences, in every layer of several checkpoints."""

    starts_with_checkpoint = False
    verbatim = ("text", "word")

    precision: Precision = "auto"
    word: Text = Field(description="the word, exactly as it is written in each sentence")
    text: Text = Field(description="the sentences, separated by |")
    checkpoint: Checkpoints
    output: Text = Field("word.html", description="output page")


class RunKeys(Config):
    """The additional keys of a command about a run."""

    @classmethod
    def has(cls, word: str) -> bool:
        """Whether a word of the command line sets one of these keys."""
        return word.partition("=")[0] in cls.model_fields

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Decodes KEY=VALUE arguments. Raises UserError for an invalid value."""
        data: JsonObject = {}
        for word in dict.fromkeys(words):
            key, _, text = word.partition("=")
            if key in data:
                raise UserError(f"{word}: {key} is set twice", "keep one of them")
            is_text = cls.model_fields[key].annotation == str | None
            data[key] = text if is_text else plain_value(text.replace(",", ""))
        return decode(cls, data)


class PlanKeys(RunKeys):
    """The additional keys of `lmtool plan`."""

    measure: bool = Field(False, description="run a few steps and measure them")
    device: str | None = Field(None, description="type of device, such as h100; null: the device of the run")

    @classmethod
    def has(cls, word: str) -> bool:
        """Whether a word of the command line sets one of these keys; a device of this machine is a key of the run."""
        return super().has(word) and re.fullmatch(_DEVICE, word.removeprefix("device=")) is None

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Decodes KEY=VALUE arguments. Raises UserError for an unknown device, and for measuring on a device type."""
        keys = super().of(words)
        if keys.device is not None:
            device_of(keys.device)
            if keys.measure:
                message = f"device={keys.device} measure=true: steps can be measured only on a device of this machine"
                raise UserError(message, f"omit one of them, measure=true or device={keys.device}")
        return keys


class InspectKeys(RunKeys):
    """The additional keys of `lmtool inspect`."""

    n: int = Field(3, ge=0, description="examples to print")
    tokens: Count = Field(200_000, description="tokens to measure")
    brief: bool = Field(False, description="print only deviations and the result of the checks")
    states: int = Field(
        0, ge=0, description="rows of each split whose hidden states are compared, for a task with checkpoint=; 0: none"
    )
    output: str | None = Field(None, description="file for the examples as JSON lines, or a page if it ends in .html")

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Decodes KEY=VALUE arguments. Raises ConfigError if the output cannot be written, before any text is read."""
        keys = super().of(words)
        if errors := list(output_errors(keys.output)):
            raise ConfigError(errors)
        return keys


class ProfileKeys(RunKeys):
    """The additional keys of `lmtool profile`."""

    steps: Count = Field(5, description="steps to profile")
    output: str | None = Field(None, description="new folder for the trace and the table; null: runs/profile-...")
