"""What `lmtool inspect tokenizer`, `attention`, `positions` and `word` read. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import Choice
from lmtool.data.configs import DataConfig
from lmtool.schema.base import DEVICE, CommandConfig

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
    vocab_size: int = Field(8192, ge=300, le=1_000_000, description="Entries of each, at most.")
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
    hidden_size: int = Field(64, ge=2, le=4096, description="Width of the token vectors of new ones.")
    num_heads: int = Field(4, ge=1, le=64, description="Heads of new ones.")
    causal: bool = Field(False, description="Whether new ones are of a stack that sees what is before alone.")
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
