"""The keys of the commands that use a checkpoint or look into one. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.auto import Auto
from lmtool.config.tables import Choice
from lmtool.data.configs import DataConfig
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.resolver.schema.base import DEVICE, CommandConfig
from lmtool.tasks.configs import TaskConfig

# What the commands read that use trained checkpoints, from evaluate to probe. Imports no torch.


class MachineConfig(CommandConfig):
    """Where and how the commands run that use trained checkpoints."""

    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=DEVICE)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Number format of the matrix products. auto: bf16 where the device has it, else fp32."
    )
    batch_tokens: int = Field(8192, ge=1, description="Maximum real tokens (without padding) in one forward pass.")
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


class TaskUseConfig(UseConfig):
    """The keys of those that predict rows of a task."""

    exit: int | None = Field(
        None,
        ge=1,
        description="Layer behind which all rows leave a model with early exits (distill=self): those above do not "
        "run. Null: the last.",
    )
    exit_entropy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Each row leaves at the first exit where the entropy of its prediction is at most this share of "
        "the largest: 0 where the model is certain, 1 always. Null: none leaves early.",
    )


class EvaluateConfig(TaskUseConfig):
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
    memory_length: int | None = Field(
        None,
        ge=0,
        description="Tokens before a segment of text that a model with a memory sees, more than in training or fewer "
        "(Dai et al. 2019). Null: as many as the model keeps in evaluation.",
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


class PredictConfig(AskConfig, TaskUseConfig):
    """`lmtool predict`: label texts, or fill their masks."""

    verbatim: ClassVar[tuple[str, ...]] = (*AskConfig.verbatim, "task")

    task: str | None = Field(
        None, description="Whose head answers, of a checkpoint that was trained for several tasks: its name."
    )
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
        "a token. auto: what a sentence encoder's folder says, with all that it puts behind the pooling; else what the "
        "checkpoint's task says, else mean.",
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
    output: str = Field("probe", description="Folder that is written: probe.json, .png and .html.", min_length=1)
    pooling: Literal["first", "mean", "max", "last"] = Field(
        "mean", description="What stands for a whole text, of a task that labels texts."
    )
    classes: int = Field(1000, ge=2, description="Of tokens: the most frequent types, among which a probe chooses.")
    examples: int = Field(10000, ge=2, description="Maximum number of training tokens or texts per probe.")
    held_out: int = Field(5000, ge=2, description="Maximum number of tokens or texts in its test set.")
    max_length: int = Field(128, ge=8, description="Maximum tokens per text.")
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


class CheckConfig(CommandConfig):
    """`lmtool check`: read a data set before anything is trained on it."""

    starts_with_checkpoint: ClassVar[bool] = False

    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="Labelled data: a task by its name, or a file."
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(None, description="Text to pretrain on.")
    checkpoint: str | None = Field(
        None,
        description="Whose tokenizer measures the lengths: a run, a checkpoint, a published folder, one that `lmtool "
        "tokenizer` wrote, or hf://org/name@revision. Null: lengths are in words.",
        min_length=1,
    )
    max_length: int = Field(128, ge=8, description="Of a checkpoint's tokens: longer texts are counted.")
    near: float | None = Field(
        0.8,
        gt=0,
        lt=1,
        description="Near-duplicates share this much of their sets of five characters, at least (Jaccard similarity). "
        "Null: equal texts alone.",
    )
    listed: int = Field(20, ge=0, description="Maximum number of rows listed per finding; all are counted.")
    output: str | None = Field(None, description="File that is written: all that was found, as JSON.", min_length=1)
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the rows that are held out where there is no development split."
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="Where text that is collected or downloaded lies.", min_length=1
    )
    offline: bool = Field(False, description="Open no network connection.")


class DoctorConfig(CommandConfig):
    """`lmtool doctor`: what this machine can do."""

    device: str = Field("auto", description="What is looked at: auto, cpu, cuda or cuda:N.", pattern=DEVICE)
    cache_dir: str = Field("~/.cache/lmtool", description="The folder of caches that runs will use.", min_length=1)
    offline: bool = Field(False, description="Open no network connection.")
    trains: bool = Field(True, description="Train a tiny model twice, and hold both against each other, bit by bit.")


# What `lmtool inspect tokenizer`, `attention`, `positions` and `word` read. Imports no torch.


Kind = Literal["wordpiece", "bytebpe", "bpe", "sentencepiece", "word", "character"]


class InspectTokenizerConfig(CommandConfig):
    """`lmtool inspect tokenizer`: one text as each kind of vocabulary cuts it, side by side."""

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("text",)

    text: str = Field(description="The text that is cut.", min_length=1)
    checkpoint: tuple[str, ...] = Field(
        (), description="Whose vocabulary stands beside them: runs, checkpoints, published folders, hf://org/name."
    )
    kinds: tuple[Kind, ...] = Field(
        ("wordpiece", "bytebpe", "bpe", "sentencepiece", "word", "character"),
        description="Kinds that are trained; [] for none.",
    )
    vocab_size: int = Field(8192, ge=300, le=1_000_000, description="Maximum vocabulary size of each.")
    data: Annotated[DataConfig, Choice("data")] = Field(description="The text that they are trained on.")
    output: str = Field("tokenizers.html", description="Page that is written.", min_length=1)
    cache_dir: str = Field("~/.cache/lmtool", description="Where trained vocabularies lie.", min_length=1)
    offline: bool = Field(False, description="Open no network connection.")


class LookConfig(CommandConfig):
    """Where a look into a checkpoint runs."""

    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=DEVICE)
    offline: bool = Field(False, description="Open no network connection.")


class ReadConfig(LookConfig):
    """The same of one for which the checkpoint reads a text."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Number format of the matrix products. auto: bf16 where the device has it, else fp32."
    )


class InspectAttentionConfig(ReadConfig):
    """`lmtool inspect attention`: what each head of a checkpoint looks at in a text."""

    verbatim: ClassVar[tuple[str, ...]] = ("text",)

    checkpoint: str = Field(
        description="Whose attention: a run or checkpoint folder, a published folder, or hf://org/name@revision.",
        min_length=1,
    )
    text: str = Field(description="The text that is read.", min_length=1)
    shown: int = Field(3, ge=0, description="Heads that are drawn on the screen: those that look at one thing most.")
    output: str = Field("attention.html", description="Page that is written, with all heads.", min_length=1)


class InspectPositionsConfig(LookConfig):
    """`lmtool inspect positions`: what each kind of positions does to the scores of equal words."""

    starts_with_checkpoint: ClassVar[bool] = False

    kinds: tuple[str, ...] = Field(
        ("learned", "sinusoidal", "rotary", "t5", "alibi", "shaw"),
        description="Kinds that are drawn, new: learned ones are random. [] for none.",
    )
    checkpoint: tuple[str, ...] = Field((), description="Whose positions are drawn beside them, as they were learned.")
    length: int = Field(64, ge=2, le=512, description="Positions.")
    hidden_size: int = Field(64, ge=2, le=4096, description="Width of the token vectors of untrained kinds.")
    num_heads: int = Field(4, ge=1, le=64, description="Attention heads of untrained kinds.")
    causal: bool = Field(False, description="Whether untrained kinds use causal attention.")
    output: str = Field("positions.html", description="Page that is written.", min_length=1)


class InspectWordConfig(ReadConfig):
    """`lmtool inspect word`: one word in several sentences, by every layer of checkpoints."""

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("text", "word")

    word: str = Field(description="The word, as it stands in each sentence.", min_length=1)
    text: str = Field(description="The sentences, with | between them.", min_length=1)
    checkpoint: tuple[str, ...] = Field(
        min_length=1, description="Whose vectors: runs, checkpoints, published folders, hf://org/name."
    )
    output: str = Field("word.html", description="Page that is written.", min_length=1)

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """One checkpoint is a list of one."""
        checkpoint = data.get("checkpoint")
        return {**data, "checkpoint": [checkpoint]} if isinstance(checkpoint, str) and checkpoint != "???" else data
