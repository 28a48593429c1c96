"""Where text comes from, as configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.data.compressed import without_packing

Path = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class FormatFacts:
    """What a text format (data/formats.py) asks for. roles: the special tokens that stand around texts. segments:
    whether it has the column that tells the two texts of a pair apart. new: special tokens by role that no vocabulary
    has: a head brings their embeddings. class_last: whether the class token stands at the end."""

    roles: tuple[str, ...]
    segments: bool = False
    new: dict[str, str] = field(default_factory=dict)
    class_last: bool = False


FORMATS = {
    "bert": FormatFacts(("cls", "sep"), segments=True),
    "roberta": FormatFacts(("cls", "sep")),
    "bart": FormatFacts(("cls", "sep")),
    "gpt": FormatFacts(("eos",)),
    "gpt1": FormatFacts((), new={"bos": "[START]", "sep": "[DELIM]", "cls": "[EXTRACT]"}),
    "plain": FormatFacts(()),
    "t5": FormatFacts(("eos",)),
    "xlnet": FormatFacts(("cls", "sep"), segments=True, class_last=True),
}
"""The formats by the name a model gives (`text_format`)."""


SUFFIXES = {
    "text": (".txt",),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}
"""The sources that are files, and the ends of the names of their files; all but parquet may be compressed."""


def kind_of(name: str) -> str | None:
    """The source that reads a file, by the end of its name."""
    plain = without_packing(name).lower()
    kind = next((kind for kind, suffixes in SUFFIXES.items() if plain.endswith(suffixes)), None)
    return None if kind == "parquet" and not name.lower().endswith(SUFFIXES[kind]) else kind


class DataConfig(Config):
    """The base of every source of text."""

    downloads: ClassVar[bool] = False
    """Whether what is built from it takes `offline`, and opens no connection where it is true."""

    name: str = Field(description="Which source.")
    documents: Literal["separate", "joined"] = Field(
        "joined",
        description="Whether an example may span documents. joined: text runs on over them, each closed by the "
        "separator, so examples are full (RoBERTa's full sentences, GPT-2's stream). separate: never.",
    )
    validation_fraction: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="Share of the documents held out for validation, at least one; the same ones for every seed.",
    )


class FileConfig(DataConfig):
    """The base of sources that are files."""

    path: Path | Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="A file, a folder (its files of the kind, sub-folders included), a glob pattern, or a list of them."
    )
    validation: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None = Field(
        None, description="Text to validate on: file, folder, glob or list. Null: validation_fraction is held out."
    )


@component("data", "text", builder="lmtool.data.text:TextSource")
class TextConfig(FileConfig):
    """Plain text files."""

    name: Literal["text"] = Field("text", description="Plain text files.")
    document: Literal["block", "file", "line"] = Field(
        "block",
        description="What a document is. block: lines up to a blank one (a paragraph of a book; a document in BERT's "
        "one-sentence-a-line format). file: a whole file. line: each line.",
    )
    encoding: str = Field(
        "utf-8", description="Character encoding of the files; a byte that does not fit is an error.", min_length=1
    )


Columns = Annotated[
    Path | Annotated[tuple[Path, ...], Field(min_length=1)],
    Field(
        description="The column that holds the text, or a list of columns, which are put under each other. In JSON "
        "lines and on the hub meta.text is text inside the object meta."
    ),
]


class RowsConfig(FileConfig):
    """The base of sources whose documents are rows."""

    text: Columns = "text"


def columns_of(config: RowsConfig | HubConfig) -> tuple[str, ...]:
    """The columns that hold the text."""
    return (config.text,) if isinstance(config.text, str) else config.text


@component("data", "jsonl", builder="lmtool.data.row_sources:JsonlSource")
class JsonlConfig(RowsConfig):
    """JSON lines: an object a line."""

    name: Literal["jsonl"] = Field("jsonl", description="JSON lines.")


@component("data", "csv", builder="lmtool.data.row_sources:CsvSource")
class CsvConfig(RowsConfig):
    """CSV and TSV files with a header line."""

    name: Literal["csv"] = Field("csv", description="CSV and TSV files with a header line.")
    delimiter: Literal["comma", "semicolon", "tab", "pipe"] | None = Field(
        None,
        description="What divides the cells, which may be quoted. Null: seen from the header; in .tsv files every tab "
        "divides, and nothing is quoted.",
    )
    encoding: str = Field(
        "utf-8", description="Character encoding of the files; a byte that does not fit is an error.", min_length=1
    )


@component("data", "parquet", builder="lmtool.data.row_sources:ParquetSource")
class ParquetConfig(RowsConfig):
    """Parquet files."""

    name: Literal["parquet"] = Field("parquet", description="Parquet files.")


@component("data", "hub", builder="lmtool.data.hub_source:HubSource")
class HubConfig(DataConfig):
    """A data set of the hub, its text kept below the cache folder."""

    downloads: ClassVar[bool] = True

    name: Literal["hub"] = Field("hub", description="A data set of the hub.")
    hub: str = Field(
        description="org/name or org/name:subset; or a folder of parquet files in the form of the hub's.", min_length=1
    )
    split: str = Field("train", description="The split that is learned from.", min_length=1)
    text: Columns = "text"
    validation: str | None = Field(
        None, description="The split to validate on. Null: validation_fraction is held out.", min_length=1
    )
    max_bytes: int = Field(
        10_000_000_000, ge=10_000, description="Text of a split to keep on disk, in bytes; reading stops there."
    )


@component("data", "pydocs", builder="lmtool.data.pydocs:PydocsSource")
class PydocsConfig(DataConfig):
    """English that every machine has: docstrings, read by parsing the sources of Python and of what is installed."""

    name: Literal["pydocs"] = Field("pydocs", description="Docstrings of the sources on this machine.")
    max_bytes: int = Field(6_000_000, ge=10_000, description="Text to collect, in bytes; collecting stops there.")
    packages: tuple[Path, ...] = Field(
        (),
        description="Packages to read, in this order; python is the standard library. "
        "Empty: the standard library, then every installed package by name.",
    )
