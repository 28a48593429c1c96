"""The keys of the commands that use or inspect a checkpoint. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.auto import Auto
from lmtool.config.base import DEVICE, CommandConfig, JsonObject
from lmtool.config.tables import Choice
from lmtool.data.configs import DataConfig
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.tasks.configs import TaskConfig


class MachineConfig(CommandConfig):
    """The keys that set where and how a trained checkpoint runs."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N", pattern=DEVICE)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto (bf16 if the device supports it), fp32, bf16, fp16"
    )
    batch_tokens: int = Field(
        8192, ge=1, description="maximum number of real tokens (without padding) in one forward pass"
    )
    cache_dir: str = Field(
        "~/.cache/lmtool", description="folder of the token stores, shared by all runs", min_length=1
    )
    offline: bool = Field(False, description="open no network connection")


class UseConfig(MachineConfig):
    """The keys of the commands that use a trained checkpoint."""

    checkpoint: str = Field(
        description="a run or checkpoint folder, a published folder, or hf://org/name@revision", min_length=1
    )
    output: str | None = Field(None, description="output file; null: the screen only", min_length=1)


class TaskUseConfig(UseConfig):
    """The keys of commands that predict rows of a task."""

    exit: int | None = Field(
        None,
        ge=1,
        description="layer at which all rows exit a model with early exits (distill=self); null: the last layer",
    )
    exit_entropy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="each row exits where the entropy is at most this fraction of the maximum (0 to 1). 0: only if the "
        "model is certain; 1: always; null: no early exit",
    )


class EvaluateConfig(TaskUseConfig):
    """`lmtool evaluate`: score a checkpoint on the data it was trained for, or on other data of the same kind."""

    descriptions: ClassVar[dict[str, str]] = {
        "output": "output file of the predictions (.jsonl); null: the screen only"
    }

    auto: ClassVar[dict[str, Auto]] = {
        "task": Auto(
            ("checkpoint",),
            hint="train it for the task first (lmtool finetune task=NAME checkpoint=RUN), or set data= to score it on "
            "text",
            implied=True,
        ),
        "data": Auto(("checkpoint",), hint="set task.path=: the checkpoint was trained for a task", implied=True),
    }

    against: str | None = Field(
        None,
        description="another checkpoint, scored on the same rows; reports the difference and its interval",
        min_length=1,
    )
    report: str | None = Field(
        None, description="output folder: evaluation.json, predictions.jsonl and plots", min_length=1
    )
    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="null: the checkpoint's task; task.path=FILE changes its data only"
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None, description="null: the checkpoint's held-out pretraining text; data=text data.path=FOLDER: all of it"
    )
    max_length: int | None = Field(
        None, ge=8, description="tokens per window that a language model reads; null: as in training"
    )
    stride: int | None = Field(
        None,
        ge=1,
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
    prompt_seeds: int = Field(3, ge=1, description="random draws of few-shot examples, each in its own order")
    normalisation: Literal["none", "length", "calibrated"] = Field(
        "length",
        description="answer scores: none (summed log-probability), length (mean), calibrated (Zhao et al. 2021). "
        "calibrated: relative to the answer's probability for empty inputs (N/A, [MASK], none)",
    )


class AskConfig(UseConfig):
    """The keys of commands that read the user's texts."""

    verbatim: ClassVar[tuple[str, ...]] = ("text", "pair")

    text: str | None = Field(None, description="one text; or use input")
    pair: str | None = Field(None, description="second text, if the task reads pairs")
    input: str | None = Field(
        None,
        description="file: one text per line (.txt), a text column or the task's (.tsv, .csv, .jsonl); -: stdin",
        min_length=1,
    )


class PredictConfig(AskConfig, TaskUseConfig):
    """`lmtool predict`: label texts, or fill their masks."""

    descriptions: ClassVar[dict[str, str]] = {
        "output": "output file (.jsonl, .csv, .tsv), including the input's columns; null: the screen"
    }

    verbatim: ClassVar[tuple[str, ...]] = (*AskConfig.verbatim, "task")

    task: str | None = Field(
        None, description="for a checkpoint trained on several tasks: the name of the task whose head predicts"
    )
    probabilities: bool = Field(False, description="write the probabilities of all classes to the output")


class GenerateConfig(UseConfig, GenerationConfig):
    """`lmtool generate`: write text."""

    descriptions: ClassVar[dict[str, str]] = {
        "output": "output file (.jsonl); null: the screen",
        "batch_tokens": "approximate number of tokens in the cache at a time",
    }

    verbatim: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: str | None = Field(None, description="one prompt; or use input")
    input: str | None = Field(
        None,
        description="file: one prompt per line (.txt), or a column of prompts (.tsv, .csv, .jsonl); -: stdin",
        min_length=1,
    )
    column: str | None = Field(
        None, description="column of the prompts in a table; null: text, or the text column of the checkpoint's task"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed for sampling: the same seed gives the same text")


class EmbedConfig(AskConfig):
    """`lmtool embed`: texts as vectors of hidden states."""

    descriptions: ClassVar[dict[str, str]] = {
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


class CheckpointsConfig(CommandConfig):
    """A command that reads several checkpoints."""

    checkpoint: tuple[str, ...] = ()

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Makes a single checkpoint a list of one."""
        checkpoint = data.get("checkpoint")
        return {**data, "checkpoint": [checkpoint]} if isinstance(checkpoint, str) and checkpoint != "???" else data


class ProbeConfig(MachineConfig, CheckpointsConfig):
    """`lmtool probe`: linear probes on every layer."""

    auto: ClassVar[dict[str, Auto]] = {
        "data": Auto(("checkpoint",), hint="set data=text data.path=FOLDER", implied=True)
    }

    checkpoint: tuple[str, ...] = Field(
        min_length=1,
        description="a run or checkpoint folder, a published folder, or hf://org/name@revision; or a list: [a,b]",
    )
    target: Literal["token", "previous", "next", "task"] = Field(
        description="token, previous or next: the identity of each token, of the one before or after it; or the name "
        "of a task, such as sst2, whose classes are probed"
    )
    output: str = Field("probe", description="output folder: probe.json, .png and .html", min_length=1)
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
    max_length: int = Field(128, ge=8, description="maximum tokens per text")
    seed: int = Field(0, ge=0, lt=2**63, description="seed for the random weights, the samples and the held-out part")
    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="labeled data, for target=NAME"
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(
        None, description="text whose held-out documents are read; null: the first checkpoint's pretraining data"
    )


class CheckConfig(CommandConfig):
    """`lmtool check`: check a data set before training on it."""

    starts_with_checkpoint: ClassVar[bool] = False

    task: Annotated[TaskConfig | None, Choice("task", key="kind", optional=True)] = Field(
        None, description="labeled data: the name of a task, or a file"
    )
    data: Annotated[DataConfig | None, Choice("data", optional=True)] = Field(None, description="text to pretrain on")
    checkpoint: str | None = Field(
        None,
        description="tokenizer that measures lengths: a run's, a folder's or `lmtool tokenizer`'s; null: words",
        min_length=1,
    )
    max_length: int = Field(128, ge=8, description="maximum tokens of a text; the number of longer texts is reported")
    near: float | None = Field(
        0.8,
        gt=0,
        lt=1,
        description="minimum Jaccard similarity of character 5-grams in near-duplicates; null: exact ones only",
    )
    listed: int = Field(20, ge=0, description="maximum number of rows listed per finding; all rows are counted")
    output: str | None = Field(None, description="output file: every finding, as JSON", min_length=1)
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="seed for the rows held out when there is no development split, and for samples",
    )
    cache_dir: str = Field("~/.cache/lmtool", description="folder for collected or downloaded text", min_length=1)
    offline: bool = Field(False, description="open no network connection")


class DoctorConfig(CommandConfig):
    """`lmtool doctor`: what this machine can do."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N", pattern=DEVICE)
    cache_dir: str = Field("~/.cache/lmtool", description="cache folder that runs will use", min_length=1)
    offline: bool = Field(False, description="open no network connection")
    trains: bool = Field(True, description="train a tiny model twice and compare the results bit by bit")


Kind = Literal["wordpiece", "bytebpe", "bpe", "sentencepiece", "word", "character"]


class InspectTokenizerConfig(CheckpointsConfig):
    """`lmtool inspect tokenizer`: one text as tokens of each type of tokenizer, side by side."""

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("text",)

    text: str = Field(description="text to tokenize", min_length=1)
    checkpoint: tuple[str, ...] = Field(
        (), description="tokenizers to compare with: runs, checkpoints, published folders, hf://org/name"
    )
    kinds: tuple[Kind, ...] = Field(
        ("wordpiece", "bytebpe", "bpe", "sentencepiece", "word", "character"),
        description="kinds of tokenizer to train; [] for none",
    )
    vocab_size: int = Field(8192, ge=300, le=1_000_000, description="maximum vocabulary size of each")
    data: Annotated[DataConfig, Choice("data")] = Field(description="training text for the new tokenizers")
    output: str = Field("tokenizers.html", description="output page", min_length=1)
    cache_dir: str = Field("~/.cache/lmtool", description="folder for trained tokenizers", min_length=1)
    offline: bool = Field(False, description="open no network connection")


class LookConfig(CommandConfig):
    """The keys that set where a checkpoint is inspected."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N", pattern=DEVICE)
    offline: bool = Field(False, description="open no network connection")


class ReadConfig(LookConfig):
    """The keys of an inspection in which the checkpoint reads a text."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto (bf16 if the device supports it), fp32, bf16, fp16"
    )


class InspectAttentionConfig(ReadConfig):
    """`lmtool inspect attention`: the attention weights of each head of a checkpoint for a text."""

    verbatim: ClassVar[tuple[str, ...]] = ("text",)

    checkpoint: str = Field(
        description="a run or checkpoint folder, a published folder, or hf://org/name@revision", min_length=1
    )
    text: str = Field(description="input text", min_length=1)
    shown: int = Field(3, ge=0, description="heads shown on the screen: those with the most concentrated attention")
    output: str = Field("attention.html", description="output page, with all heads", min_length=1)


class InspectPositionsConfig(LookConfig, CheckpointsConfig):
    """`lmtool inspect positions`: the effect of each type of position encoding on the scores of equal words."""

    starts_with_checkpoint: ClassVar[bool] = False

    kinds: tuple[str, ...] = Field(
        ("learned", "sinusoidal", "rotary", "t5", "alibi", "shaw"),
        description="untrained kinds to show (learned ones are random); [] for none",
    )
    checkpoint: tuple[str, ...] = Field((), description="checkpoints whose trained positions are shown as well")
    length: int = Field(64, ge=2, le=512, description="number of positions")
    hidden_size: int = Field(64, ge=2, le=4096, description="width of the token vectors of untrained kinds")
    num_heads: int = Field(4, ge=1, le=64, description="attention heads of untrained kinds")
    causal: bool = Field(False, description="true: untrained kinds use causal attention")
    output: str = Field("positions.html", description="output page", min_length=1)


class InspectWordConfig(ReadConfig, CheckpointsConfig):
    """`lmtool inspect word`: one word in several sentences, in every layer of several checkpoints."""

    starts_with_checkpoint: ClassVar[bool] = False
    verbatim: ClassVar[tuple[str, ...]] = ("text", "word")

    word: str = Field(description="the word, exactly as it is written in each sentence", min_length=1)
    text: str = Field(description="the sentences, separated by |", min_length=1)
    checkpoint: tuple[str, ...] = Field(
        min_length=1,
        description="a run or checkpoint folder, a published folder, or hf://org/name@revision; or a list: [a,b]",
    )
    output: str = Field("word.html", description="output page", min_length=1)
