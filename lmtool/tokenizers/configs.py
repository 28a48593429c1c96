"""How text becomes tokens, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component


class TokenizerConfig(Config):
    """The base of every tokenizer."""

    reads_text: ClassVar[bool] = True
    """Whether it is trained on the run's text; its vocabulary is then kept for other runs on the same text."""

    free_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "minimum_count")
    """Fields that may differ from a checkpoint's: they are read in training a vocabulary only."""

    name: str = Field(description="Which tokenizer.")
    vocab_size: int | None = Field(
        None, ge=16, le=2**31 - 1, description="Entries of the vocabulary, special tokens included. Null: the model's."
    )


@component("tokenizer", "wordpiece", builder="lmtool.tokenizers.wordpiece:train")
class WordPieceConfig(TokenizerConfig):
    """WordPiece with BERT's text cleaning and special tokens (Devlin et al. 2019)."""

    name: Literal["wordpiece"] = Field("wordpiece", description="WordPiece, as BERT has it.")
    lowercase: bool = Field(True, description="Lowercase the text and strip its accents (BERT's uncased models).")
    minimum_count: int = Field(2, ge=1, description="Occurrences a pair of pieces needs in the text to be joined.")


@component("tokenizer", "bytebpe", builder="lmtool.tokenizers.bytebpe:train")
class ByteBpeConfig(TokenizerConfig):
    """Byte-level byte-pair encoding with GPT-2's splitting of words and its one special token (Radford et al. 2019)."""

    name: Literal["bytebpe"] = Field("bytebpe", description="Byte-level byte-pair encoding, as GPT-2 has it.")
    vocab_size: int | None = Field(
        None,
        ge=257,
        le=2**31 - 1,
        description="Entries of the vocabulary: the 256 bytes, the special token, the merges. Null: the model's.",
    )
    minimum_count: int = Field(2, ge=1, description="Occurrences a pair of pieces needs in the text to be joined.")


@component("tokenizer", "folder", builder="lmtool.tokenizers.folder:load")
class FolderConfig(TokenizerConfig):
    """A tokenizer that exists: of a run, a checkpoint, or a folder in Hugging Face's layout."""

    reads_text: ClassVar[bool] = False

    name: Literal["folder"] = Field("folder", description="A tokenizer that exists.")
    path: str = Field(min_length=1, description="Folder with tokenizer.json, or a run folder.")
