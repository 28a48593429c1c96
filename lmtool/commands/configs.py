"""What each command reads: the run-wide keys, and the sections whose classes their rooms define."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.auto import Auto
from lmtool.config.base import Config
from lmtool.config.tables import Choice, lookup

# Each room's module enters its components into the tables.
from lmtool.data.configs import DataConfig
from lmtool.generation.configs import GenerationConfig
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models import encoder_configs as encoder_configs
from lmtool.models import encoder_decoder_configs as encoder_decoder_configs
from lmtool.models.configs import ModelConfig
from lmtool.objectives import configs as configs
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, ScheduleConfig
from lmtool.tuning.configs import TuningConfig

_START = (
    "give checkpoint=runs/NAME (a run of lmtool pretrain), or model=bert_tiny for random weights; "
    "a task's data are read from task.path=FOLDER"
)
_FROM_CHECKPOINT = Auto(("checkpoint",), hint=_START, agrees=True)
_DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


class CommandConfig(Config):
    """The keys that every command shares."""

    auto: ClassVar[dict[str, Auto]] = {}
    """Where a section that is `auto` comes from."""
    verbatim: ClassVar[tuple[str, ...]] = ()
    """Keys whose value is text as it is typed: commas, quotes and brackets mean nothing in it."""
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys of which one is typed: the other would not be read."""
    overlays: ClassVar[tuple[str, ...]] = ()
    """Groups that set values of other sections and have none of their own."""

    plugins: tuple[str, ...] = Field(
        (), description="Python modules whose components are added; typed with --plugin, never read from a file."
    )


class RunConfig(CommandConfig):
    """The keys that every training command shares."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("schedule.warmup_steps", "schedule.warmup_fraction"),)
    overlays: ClassVar[tuple[str, ...]] = ("experiment", "debug")

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
    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=_DEVICE)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Number format of the matrix products; weights stay fp32. auto: bf16 where the device has it, else "
        "fp32.",
    )
    max_steps: int | None = Field(
        None, ge=1, description="Stop after this many optimizer steps; whichever budget comes first ends the run."
    )
    max_epochs: float | None = Field(None, gt=0, description="Stop after this many passes over the training examples.")
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
        None, ge=1, description="Real tokens in a step's batch, at most; or give batch_examples."
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Real tokens in one forward, at most; a larger batch is accumulated. Null: no limit. Changes no "
        "result beyond rounding.",
    )
    max_length: int = Field(
        128, ge=8, description="Tokens in one packed sequence, at most; longer texts are cut or split."
    )
    log_every: int = Field(10, ge=1, description="Steps between rows in metrics.jsonl.")
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
        description="How text becomes tokens; auto: the checkpoint's, else the kind the model names, trained on the "
        "run's text."
    )
    model: Annotated[ModelConfig, Choice("model")] = Field(
        description="The architecture; auto: the checkpoint's, in pretraining without one bert."
    )


class PretrainConfig(RunConfig):
    """`lmtool pretrain`."""

    tuned_by: ClassVar[None] = None

    auto: ClassVar[dict[str, Auto]] = {
        "model": Auto(("checkpoint", {"name": "bert"}), agrees=True),
        "tokenizer": Auto(("checkpoint", "model.recipe.tokenizer"), hint="give tokenizer=NAME", agrees=True),
        "objective": Auto(("model.recipe.pretrain.objective",), hint="give objective=NAME"),
        "optimizer": Auto(("model.recipe.pretrain.optimizer",)),
        "schedule": Auto(("model.recipe.pretrain.schedule",)),
    }

    data: Annotated[DataConfig, Choice("data")] = Field(description="The text to learn from.")
    objective: Annotated[ObjectiveConfig, Choice("objective")] = Field(
        description="What is learned from it; auto: the published one of the model."
    )

    @property
    def learns(self) -> ObjectiveConfig:
        """The section of what is learned."""
        return self.objective


class FinetuneConfig(RunConfig):
    """`lmtool finetune`."""

    auto: ClassVar[dict[str, Auto]] = {
        "model": _FROM_CHECKPOINT,
        "tokenizer": Auto(("checkpoint", "model.recipe.tokenizer"), hint="give tokenizer=NAME", agrees=True),
        "optimizer": Auto(("model.recipe.finetune.optimizer",)),
        "schedule": Auto(("model.recipe.finetune.schedule",)),
    }

    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="What is learned, and from which labelled data."
    )
    tuning: Annotated[TuningConfig, Choice("tuning")] = Field(description="Which parameters learn.")

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A null max_length is that of the task's kind, as far as the model has positions."""
        if data.get("max_length", 0) is not None:
            return data
        task, model = data.get("task"), data.get("model")
        entry = lookup("task", str(task.get("kind"))) if isinstance(task, dict) else None
        length = getattr(entry.config if entry is not None else TaskConfig, "default_max_length", 128)
        positions = model.get("max_positions") if isinstance(model, dict) else None
        return {**data, "max_length": min(length, positions) if isinstance(positions, int) else length}

    @property
    def learns(self) -> TaskConfig:
        """The section of what is learned."""
        return self.task

    @property
    def tuned_by(self) -> TuningConfig:
        """The section of the method."""
        return self.tuning


class MachineConfig(CommandConfig):
    """Where and how the commands run that use trained checkpoints."""

    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=_DEVICE)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Number format of the matrix products. auto: bf16 where the device has it, else fp32."
    )
    batch_tokens: int = Field(8192, ge=1, description="Real tokens in one forward, at most.")
    cache_dir: str = Field(
        "~/.cache/lmtool", description="Folder of the token stores, shared by all runs.", min_length=1
    )
    offline: bool = Field(False, description="Open no network connection.")


class UseConfig(MachineConfig):
    """The keys of the commands that use a trained checkpoint."""

    checkpoint: str = Field(
        description="What to use: a run or checkpoint folder, a published folder, or hf://org/name@revision.",
        min_length=1,
    )
    output: str | None = Field(None, description="File that is written. Null: only the screen.", min_length=1)


class EvaluateConfig(UseConfig):
    """`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind."""

    auto: ClassVar[dict[str, Auto]] = {
        "task": Auto(("checkpoint",), hint="its checkpoint was trained for no task: give data=", implied=True),
        "data": Auto(("checkpoint",), hint="its checkpoint was trained for a task: give task.path=", implied=True),
    }

    against: str | None = Field(
        None,
        description="Another checkpoint, scored on the same rows: the difference with its interval is added.",
        min_length=1,
    )
    report: str | None = Field(
        None,
        description="Folder that is written: evaluation.json, predictions.jsonl and plots. Null: only the screen.",
        min_length=1,
    )
    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="Labelled data to score on. Null: the checkpoint's task; task.path= alone changes the data."
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None,
        description="Text to score on: all of it, or data.validation where that is given. Null: the held-out text of "
        "what the checkpoint was pretrained on.",
    )
    max_length: int | None = Field(
        None, ge=8, description="Tokens that a language model reads at a time. Null: as in training."
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="Tokens between the windows of a causal language model: each token is predicted once, from "
        "max_length - stride tokens before it at least. Null: windows as in training, one behind the other.",
    )
    shots: int | None = Field(
        None,
        ge=0,
        description="Demonstrations in front of each row of a task, on which a language model is scored by prompts, "
        "without training (Brown et al. 2020). Null: a finetuned checkpoint is scored.",
    )
    prompt_seeds: int = Field(
        3, ge=1, description="Draws of demonstrations, each with an order of its own; their scores' mean and spread."
    )
    normalisation: Literal["none", "length", "calibrated"] = Field(
        "length",
        description="Of an answer's log-probability. none: the sum over its tokens. length: their mean. calibrated: "
        "against its probability where the input says nothing (N/A, [MASK], empty; Zhao et al. 2021).",
    )


class AskConfig(UseConfig):
    """The keys of the commands that read texts of the user's."""

    verbatim: ClassVar[tuple[str, ...]] = ("text", "pair")

    text: str | None = Field(None, description="One text to read; or give input.")
    pair: str | None = Field(None, description="The second text, where pairs are read.")
    input: str | None = Field(
        None,
        description="File to read, one text a line (.txt) or with the task's columns (.tsv, .csv, .jsonl); - reads "
        "lines from standard input.",
        min_length=1,
    )


class PredictConfig(AskConfig):
    """`lmtool predict`: label texts, or fill their masks."""

    probabilities: bool = Field(False, description="Write the probabilities of all classes to the output.")


class GenerateConfig(UseConfig, GenerationConfig):
    """`lmtool generate`: write text."""

    verbatim: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: str | None = Field(None, description="One text to begin with; or give input.")
    input: str | None = Field(
        None,
        description="File of prompts, one a line (.txt) or in a column (.tsv, .csv, .jsonl); - reads lines from "
        "standard input.",
        min_length=1,
    )
    column: str | None = Field(
        None, description="Column of the prompts in a table. Null: text, or the one that the checkpoint's task reads."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the draws: the same seed gives the same text.")


class EmbedConfig(AskConfig):
    """`lmtool embed`: texts as vectors of hidden states."""

    layers: int | Literal["last", "all", "mean"] = Field(
        "last",
        description="Layers that are read: last, a number (0 is the embedding), all, or the mean of all but the "
        "embedding. Of an encoder-decoder its encoder's.",
    )
    pooling: Literal["auto", "none", "first", "mean", "max", "last"] = Field(
        "auto",
        description="One vector a text: the first token's, the mean, the maximum or the last token's; none: a vector "
        "a token. auto: what a sentence encoder's folder or the checkpoint's task says, else mean.",
    )


class ProbeConfig(MachineConfig):
    """`lmtool probe`: linear probes on every layer."""

    auto: ClassVar[dict[str, Auto]] = {
        "data": Auto(("checkpoint",), hint="give data=text data.path=FOLDER", implied=True)
    }

    checkpoint: tuple[str, ...] = Field(
        min_length=1,
        description="What is probed: a run or checkpoint folder, a published folder, or hf://org/name@revision; or a "
        "list of them, which are drawn together.",
    )
    target: Literal["token", "previous", "next", "task"] = Field(
        description="What a probe predicts of a hidden state: the token at its place, the one before or the one after "
        "it; or the classes of a task, typed by its name."
    )
    output: str = Field("probe", description="Folder that is written: probe.json and probe.png.", min_length=1)
    pooling: Literal["first", "mean", "max", "last"] = Field(
        "mean", description="What stands for a whole text, of a task that labels texts."
    )
    classes: int = Field(1000, ge=2, description="Of tokens: the most frequent types, among which a probe chooses.")
    examples: int = Field(10000, ge=2, description="Tokens or texts that a probe learns from, at most.")
    held_out: int = Field(5000, ge=2, description="Tokens or texts that it is scored on, at most.")
    max_length: int = Field(128, ge=8, description="Tokens of a text, at most.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the random weights, and of what is drawn and held out.")
    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="Labelled data, for target=NAME."
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None, description="Text, whose held-out documents are read. Null: what the first checkpoint was pretrained on."
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """One checkpoint is a list of one."""
        checkpoint = data.get("checkpoint")
        return {**data, "checkpoint": [checkpoint]} if isinstance(checkpoint, str) and checkpoint != "???" else data


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
    """`lmtool export`: a folder that transformers loads."""


class ImportConfig(TransferConfig):
    """`lmtool import`: a checkpoint of lmtool from a published folder."""


COMMANDS: dict[str, type[Any]] = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "evaluate": EvaluateConfig,
    "predict": PredictConfig,
    "generate": GenerateConfig,
    "embed": EmbedConfig,
    "probe": ProbeConfig,
    "tokenizer": TokenizerCommandConfig,
    "export": ExportConfig,
    "import": ImportConfig,
}
"""The commands that read a configuration, and its class."""
