"""Configuration of sources of text, and the table of text formats. Imports no torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.base import Config
from lmtool.config.decode import title_of, with_member_values
from lmtool.config.registry import Choice, component, lookup, names
from lmtool.data.compressed import without_compression_suffix
from lmtool.errors import nearest
from lmtool.system.environment import is_reachable
from lmtool.system.files import user_path

Path = Annotated[str, Field(min_length=1)]
SHORTEST = 8
"""Minimum of max_length."""
Truncation = Literal["longest_first", "bert"]
"""Rules that shorten the texts of an example, see `lmtool.data.formats.truncate_texts`."""


@dataclass(frozen=True)
class TextFormatSpec:
    """A text format.

    Attributes:
        roles: The special tokens around texts.
        layouts: For one text and for a pair: special tokens by role and the texts A and B, in order. A suffix such as
            `:1` is the segment; it is 0 otherwise.
        segments: Whether tokens have the column "segment", which distinguishes the two texts.
        added: Special tokens by role that finetuning adds; no vocabulary has them, so a head holds their embeddings.
    """

    roles: tuple[str, ...]
    layouts: tuple[str, str]
    segments: bool = False
    added: dict[str, str] = field(default_factory=dict)


FORMATS = {
    # Devlin et al. 2019
    "bert": TextFormatSpec(("cls", "sep"), ("cls A sep", "cls A sep B:1 sep:1"), segments=True),
    # Liu et al. 2019; BART: Lewis et al. 2020
    "roberta": TextFormatSpec(("cls", "sep"), ("cls A sep", "cls A sep sep B sep")),
    "bart": TextFormatSpec(("cls", "sep"), ("cls A sep", "cls A sep sep B sep")),
    # Radford et al. 2019; a head reads the last token. T5: Raffel et al. 2020
    "gpt": TextFormatSpec(("eos",), ("A eos", "A eos B eos")),
    "t5": TextFormatSpec(("eos",), ("A eos", "A eos B eos")),
    # Peters et al. 2018: github.com/allenai/bilm-tf, bilm/data.py
    "elmo": TextFormatSpec(("bos", "eos"), ("bos A eos", "bos A eos bos B eos")),
    # Radford et al. 2018, section 3.3: finetuning adds the special tokens
    "gpt1": TextFormatSpec(
        (), ("bos A cls", "bos A sep B cls"), added={"bos": "[START]", "sep": "[DELIM]", "cls": "[EXTRACT]"}
    ),
    # transformers' tokenizers of GPT and GPT-2
    "plain": TextFormatSpec((), ("A", "A B")),
    # Yang et al. 2019
    "xlnet": TextFormatSpec(("cls", "sep"), ("A sep cls:2", "A sep B:1 sep:1 cls:2"), segments=True),
}
"""The text formats by their name in a model's configuration (`text_format`)."""


SUFFIXES = {
    "text": (".txt",),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}
"""Suffixes of the files of each source; all except parquet files may be compressed."""


def kind_of(name: str) -> str | None:
    """Returns the name of the source that reads a file, by its suffix; None if no source does."""
    plain = without_compression_suffix(name).lower()
    kind = next((kind for kind, suffixes in SUFFIXES.items() if plain.endswith(suffixes)), None)
    return None if kind == "parquet" and not name.lower().endswith(SUFFIXES[kind]) else kind


def contains(path: str, file: PurePath, in_folders: bool = True) -> bool:
    """Whether a path leads to a file: it is the file, a folder above it, or a glob pattern that matches one of these.
    file: the real path of the file. in_folders: whether folders count."""
    matches = {os.path.realpath(match) for match in glob.iglob(str(user_path(path)), recursive=True)}
    return str(file) in matches or (in_folders and not matches.isdisjoint(map(str, file.parents)))


class DataConfig(Config):
    """Base class of sources of text."""

    downloads: ClassVar[bool] = False
    """Whether the source may download; its builder then has the parameter `offline`."""

    name: str = Field(description="Which source.")
    documents: Literal["separate", "joined"] = Field(
        "joined",
        description="joined: examples may span documents; separate: each example stays within one document. joined "
        "closes each document with the separator and fills every example (RoBERTa's full sentences, GPT-2's stream)",
    )
    validation_fraction: float = Field(
        0.02, gt=0, lt=1, description="fraction of the documents held out, at least one; the same ones for every seed"
    )

    def reads_file(self, file: PurePath) -> bool:
        """Whether the source reads an existing file, given by its real path."""
        return False


class FileConfig(DataConfig):
    """Base class of sources in files."""

    path: Path | Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="file, folder, glob, or [list, of, these]"
    )
    validation: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None = Field(
        None, description="validation text; null: hold out validation_fraction of the documents"
    )

    def reads_file(self, file: PurePath) -> bool:
        values = (self.path, self.validation or ())
        paths = (path for value in values for path in ((value,) if isinstance(value, str) else value))
        return any(contains(path, file, kind_of(file.name) == self.name) for path in paths)


@component("data", "text", builder="lmtool.data.text:TextSource")
class TextConfig(FileConfig):
    """Plain text files."""

    name: Literal["text"] = Field("text", description="Plain text files.")
    document: Literal["block", "file", "line"] = Field(
        "block",
        description="block: a document ends at a blank line; file: a whole file is one; line: each line is one. A "
        "block is a paragraph of a book, or a document in BERT's one-sentence-per-line format",
    )
    encoding: str = Field("utf-8", description="invalid bytes are an error that names the file and line", min_length=1)


Columns = Annotated[
    Path | Annotated[tuple[Path, ...], Field(min_length=1)],
    Field(description="column of the text; meta.text: nested field; [title,text]: columns joined by newlines"),
]


class RowsConfig(FileConfig):
    """Base class of sources with a document per row."""

    text: Columns = "text"


def columns_of(config: RowsConfig | HubConfig) -> tuple[str, ...]:
    """Returns the columns of text."""
    return (config.text,) if isinstance(config.text, str) else config.text


@component("data", "jsonl", builder="lmtool.data.text:JsonlSource")
class JsonlConfig(RowsConfig):
    """JSON lines: one object per line."""

    descriptions: ClassVar[dict[str, str]] = {"path": "file, folder (.jsonl .json .ndjson), glob, or [list, of, these]"}

    name: Literal["jsonl"] = Field("jsonl", description="JSON lines.")


@component("data", "csv", builder="lmtool.data.text:CsvSource")
class CsvConfig(RowsConfig):
    """CSV and TSV files with a header line."""

    descriptions: ClassVar[dict[str, str]] = {"path": "file, folder (.csv .tsv), glob, or [list, of, these]"}

    name: Literal["csv"] = Field("csv", description="CSV and TSV files with a header line.")
    delimiter: Literal["comma", "semicolon", "tab", "pipe"] | None = Field(
        None, description="comma, semicolon, tab or pipe, cells may be quoted; null: inferred (.tsv: no quoting)"
    )
    encoding: str = Field("utf-8", description="invalid bytes are an error that names the file and line", min_length=1)


@component("data", "parquet", builder="lmtool.data.text:ParquetSource")
class ParquetConfig(RowsConfig):
    """Parquet files."""

    descriptions: ClassVar[dict[str, str]] = {"path": "file, folder (.parquet), glob, or [list, of, these]"}

    name: Literal["parquet"] = Field("parquet", description="Parquet files.")


@component("data", "hub", builder="lmtool.data.hub_source:HubSource")
class HubConfig(DataConfig):
    """A data set of the hub, whose text is stored in the cache folder."""

    downloads: ClassVar[bool] = True

    name: Literal["hub"] = Field("hub", description="A data set of the hub.")
    hub: str = Field(
        description="org/name or org/name:subset; or a folder of parquet files in the hub's layout", min_length=1
    )
    split: str = Field("train", description="training split", min_length=1)
    text: Columns = "text"
    validation: str | None = Field(
        None, description="validation split; null: hold out validation_fraction of the rows", min_length=1
    )
    max_bytes: int = Field(
        10_000_000_000, ge=10_000, description="maximum text per split to keep on disk, in bytes; reading stops there"
    )


def hub_folder(hub: str, cache_dir: str) -> str:
    """Returns the folder in which the library datasets keeps the rows of a data set, org/name or org/name:subset."""
    name, _, subset = hub.partition(":")
    return os.path.join(user_path(cache_dir), "hub", name.replace("/", "___"), subset)


def is_cached(hub: str, cache_dir: str) -> bool:
    """Whether the library datasets has rows of a data set on this machine: it writes dataset_info.json last."""
    folder = glob.escape(hub_folder(hub, cache_dir))
    return bool(glob.glob(os.path.join(folder, "**", "dataset_info.json"), recursive=True))


def missing_hub_data(hub: str, cache_dir: str, offline: bool) -> str | None:
    """Returns the reason why a data set of the hub cannot be read, from the cache or by a download; None if it can."""
    if user_path(hub.partition(":")[0]).is_dir() or is_cached(hub, cache_dir):
        return None
    from huggingface_hub import constants  # takes a third of a second

    if offline or constants.HF_HUB_OFFLINE:
        return "offline=true or HF_HUB_OFFLINE is set"
    return None if is_reachable(constants.ENDPOINT) else "there is no network"


@component("data", "pydocs", builder="lmtool.data.pydocs:PydocsSource")
class PydocsConfig(DataConfig):
    """English text on every machine: docstrings in the sources of Python and of installed packages."""

    name: Literal["pydocs"] = Field("pydocs", description="Docstrings of the sources on this machine.")
    max_bytes: int = Field(6_000_000, ge=10_000, description="maximum amount of text to collect, in bytes")
    packages: tuple[Path, ...] = Field(
        (),
        description="packages to read, in this order (python: the standard library); empty: the standard library, then "
        "all installed packages by name",
    )


@component("data", "mixture", builder="lmtool.data.sources:MixtureSource")
class MixtureTextConfig(DataConfig):
    """Several texts in one run, each with its own store, mixed by weights."""

    downloads: ClassVar[bool] = True  # if a member does

    name: Literal["mixture"] = Field("mixture", description="A mixture of texts.")
    members: tuple[str | dict[str, object], ...] = Field(
        min_length=1,
        description="names of data options, or sections: [wikipedia, {title: mine, name: text, path: FOLDER}]; "
        "data.with.NAME.KEY=VALUE sets a key of one member. A section's title names it within the mixture and "
        "defaults to its name",
    )
    weights: tuple[float, ...] | None = Field(
        None, description="fraction of the examples, one number per member; null: by size (each example once per epoch)"
    )
    documents: Literal["separate", "joined"] | None = Field(  # type: ignore[assignment]
        None, description="for all members; null: each member's own"
    )
    validation_fraction: float | None = Field(  # type: ignore[assignment]
        None, gt=0, lt=1, description="for all members; null: each member's own"
    )

    @classmethod
    def filled(cls, data: dict[str, object]) -> dict[str, object]:
        return with_member_values(data)

    def member_configs(self) -> dict[str, DataConfig]:
        """Returns the members by title."""
        common = {
            name: value for name in ("documents", "validation_fraction") if (value := getattr(self, name)) is not None
        }
        return {title_of(member): _section(member).model_copy(update=common) for member in self.members}

    def reads_file(self, file: PurePath) -> bool:
        return any(member.reads_file(file) for member in self.member_configs().values())

    def fractions(self) -> tuple[float, ...] | None:
        """Returns the weights, normalized to a sum of 1; None if there are none."""
        return None if self.weights is None else tuple(weight / sum(self.weights) for weight in self.weights)

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureTextConfig:
        titles = [title_of(member) for member in self.members]
        titles_text = ", ".join(titles)
        if len(titles) < 2:
            raise ValueError(
                f"members=[{titles_text}]: a mixture needs two or more; set data={titles_text} to read one text"
            )
        repeated = next((title for title in titles if titles.count(title) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"members=[{titles_text}]: {repeated} is named twice; give one of them another title: "
                f"{{title: more, name: {repeated}, path: FILE}}"
            )
        for member, title in zip(self.members, titles, strict=True):
            if isinstance(member, dict) and "name" not in member:
                raise ValueError(f"members: a section has no name; set name: to one of {', '.join(names('data'))}")
            if title == "mixture":
                raise ValueError("members: a mixture cannot be a member of another; name its members here")
            if not title.isidentifier() or lookup("objective", title) is not None:
                raise ValueError(
                    f"members: the title {title} cannot be used in the names of scores; use letters, digits and _, and "
                    "no name of an objective"
                )
            try:
                section = _section(member)
            except (ValidationError, PydanticCustomError) as error:
                raise ValueError(f"members: {_member_message(title, member, error)}") from error
            if isinstance(section, MixtureTextConfig):
                raise ValueError(f"members: {title} is a mixture; name its members here")
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(
                f"weights={list(self.weights)}: there must be a number above 0 for each of the {len(titles)} members"
            )
        return self


def _section(member: str | dict[str, object]) -> DataConfig:
    section = {"name": member} if isinstance(member, str) else {k: v for k, v in member.items() if k != "title"}
    decoded = Choice("data").validate(section)
    assert isinstance(decoded, DataConfig)
    return decoded


def _member_message(title: str, member: str | dict[str, object], error: ValidationError | PydanticCustomError) -> str:
    if isinstance(error, PydanticCustomError):
        name = (error.context or {}).get("given")
        subject = "a section has no name; set name: to" if name is None else f"{name} is not"
        close = nearest(str(name), names("data"))
        return f"{subject} one of {', '.join(names('data'))}" + (f"; did you mean {close}?" if close else "")
    details = error.errors(include_url=False, include_input=False)
    detail = min(details, key=lambda detail: detail["type"] == "missing")  # a misspelled key causes a missing one
    key = ".".join(map(str, (f"data.with.{title}", *detail["loc"])))
    if detail["type"] == "missing":
        return f"{title} lacks a value; set {key}=..."
    if detail["type"] == "extra_forbidden":
        close = nearest(str(detail["loc"][-1]), _keys(member))
        return f"unknown key {key}" + (f"; did you mean data.with.{title}.{close}?" if close else "")
    return f"{key}: {detail['msg'].removeprefix('Value error, ')}"


def _keys(member: str | Mapping[str, object]) -> tuple[str, ...]:
    entry = lookup("data", member if isinstance(member, str) else str(member.get("name")))
    return () if entry is None else tuple(entry.config.model_fields)
