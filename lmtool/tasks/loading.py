"""Loads the data of a task from local files, the hub, or installed packages: labeled rows, and texts to pretrain on.

A local folder contains train, dev and test files; `task.files` and `task.validation` map other names. If there is no
development split, a seeded tenth of the training rows is held out; rows with equal texts are kept together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.data.examples import Rows, SplitData, unlabeled_name
from lmtool.data.pydocs import pydocs_rows
from lmtool.data.sources import OnStage, held_out, in_parts, splits_of
from lmtool.errors import UserError
from lmtool.random_streams import Permutation
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import TaskConfig, joined_columns
from lmtool.tasks.configs.mixture import TaskTextConfig
from lmtool.tasks.configs.sequence import WindowedConfig
from lmtool.tasks.files import TaskTable, canonical, read_folder, read_hub
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import Columns, Origin, cell_text, repeated_ids, with_joined_columns

HELD_OUT = 0.1
# Each draw has a number in the random stream "sample": held-out rows, training rows, few-shot rows (plus the class).
_HOLD_OUT, _SUBSET, _SHOTS = 0, 1, 1 << 10


@dataclass(frozen=True)
class TaskData:
    """The data of a loaded task. config: the configuration completed with labels and class weights, from which the
    learner is built. validation, test: the rows of each split, in the order of the configuration. metadata: plain data
    for screens and reports. unlabeled: additional training rows without labels."""

    config: TaskConfig
    train: Rows
    validation: dict[str, Rows]
    test: dict[str, Rows]
    metadata: JsonObject
    unlabeled: Rows | None = None

    @property
    def members(self) -> dict[str, TaskData]:
        """This task by its name, as a mixture returns its several tasks."""
        return {self.config.name: self}

    def texts(self) -> list[Sequence[str]]:
        """Returns the training texts by column."""
        kind: TaskKind = build(self.config)
        extra = {} if self.unlabeled is None else self.unlabeled.columns
        return [*kind.texts(self.train), *(list(map(cell_text, cells)) for cells in extra.values())]

    def contents(self) -> dict[str, object]:
        """Returns counts and hashes of the training and evaluation data, by title ("dev labels")."""
        contents: dict[str, object] = {}
        for split, rows in {"train": self.train, **self.validation}.items():
            contents |= {f"{split} rows": len(rows), f"{split} texts": _sha256(list(rows.columns.values()))}
            contents[f"{split} labels"] = _sha256(_labels(rows))
            if rows.parents:
                first, *others = rows.parents.values()
                contents[f"{split} trees"] = _sha256([*first, *others])
        if self.unlabeled is not None:
            contents["unlabelled texts"] = _sha256(list(self.unlabeled.columns.values()))
        return contents

    def splits(self) -> dict[str, SplitData]:
        """Returns the training and development splits, for a learner."""
        splits = self._split_data({"train": self.train, **self.validation})
        if self.unlabeled is not None:
            name = self.config.name
            splits["train"] = SplitData("train", rows={name: self.train, unlabeled_name(name): self.unlabeled})
        return splits

    def labeled_tests(self) -> dict[str, SplitData]:
        """Returns the test splits with labels."""
        return self._split_data({split: rows for split, rows in self.test.items() if rows.labels is not None})

    def _split_data(self, splits: dict[str, Rows]) -> dict[str, SplitData]:
        return {split: SplitData(split, rows={self.config.name: rows}) for split, rows in splits.items()}


def load_task(config: TaskConfig, seed: int, cache_dir: str | Path, offline: bool, scoring: bool = False) -> TaskData:
    """Reads, checks and decodes all splits of a task. seed: samples the held-out rows and `train_examples`. cache_dir:
    the folder for files that sources build. offline: True to open no connection. scoring: True if nothing is trained: a
    single file is then a development split. Raises UserError with file:line, or the key to change."""
    tables, metadata = read_tables(config, cache_dir, offline, scoring)
    return decode_tables(config, tables, metadata, seed, scoring)


def decode_tables(
    config: TaskConfig, tables: Mapping[str, TaskTable], metadata: JsonObject, seed: int, scoring: bool = False
) -> TaskData:
    """Decodes the tables of a task's splits; see `load_task`."""
    configured_kind: TaskKind = build(config)
    if scoring and config.path is not None and user_path(config.path).is_file():
        tables = {**tables, "dev": tables["train"]}
    if scoring and "train" not in tables:
        return _without_train(config, configured_kind, tables, metadata)
    columns = {split: _columns(config, split, table) for split, table in tables.items()}
    if "train" not in columns:
        raise UserError(
            f"{metadata['source']} has no train split; it has {', '.join(sorted(columns)) or 'none'}",
            "name a folder with a train file (train.tsv, train.csv or train.jsonl), or one file to train on",
        )
    _require_label(config, "train", columns["train"], tables["train"])
    kind: TaskKind = build(configured_kind.with_labels(columns["train"], tables["train"].origin))

    def decode(split: str, labeled: bool) -> Rows:
        if labeled:
            _require_label(config, split, columns[split], tables[split])
        return kind.rows(columns[split], tables[split].origin, labeled)

    train = decode("train", True)
    validation = {split: decode(split, True) for split in _development_splits(config, columns)}
    test = {split: decode(split, False) for split in map(canonical, config.test) if split in columns}
    if not validation:
        train, validation["dev"] = _hold_out(train, kind.groups(train), seed)
        count = len(validation["dev"])
        metadata["held out"] = f"{count:,} of {len(train) + count:,} training rows, as there is no development split"
    if config.train_examples is not None and config.train_examples < len(train):
        metadata["train_rows_available"] = len(train)
        train = train.take(np.sort(Permutation(len(train), seed, "sample", _SUBSET)(np.arange(config.train_examples))))
    shots, unlabeled = config.few_shots, None
    if shots is not None:
        train, selection, unused_rows, few_shot = _few_shots(kind, train, validation, test, shots, seed)
        test |= {f"full_{split}": rows for split, rows in validation.items()}
        validation, metadata = {"dev": selection}, {**metadata, **few_shot}
        unlabeled = unused_rows if config.has_auxiliary_mlm and len(unused_rows) else None
    kind_metadata, warnings = kind.metadata(train)
    repeated = [repeated_ids(columns[split], tables[split].origin) for split in columns]
    warnings = [*warnings, *(problem for problem in repeated if problem is not None)]
    if place := metadata.pop("quoted_cell", None):
        warnings.append(
            f"{place}: a cell is quoted as pandas and csv write it, but a .tsv is read literally, with its quotes: "
            "name it .csv to read quoted cells"
        )
    if short := metadata.pop("dialogues_without_reply", 0):
        warnings.append(f"{counted(short, 'dialogue')} of fewer than two utterances left out, without a reply")
    unscored = [split for split, rows in test.items() if rows.labels is None]
    if unscored:
        metadata["not_scored"] = f"{', '.join(unscored)} (no labels)"
    metadata |= {
        "train_rows": len(train),
        "validation_rows": {split: len(rows) for split, rows in validation.items()},
        "test_rows": {split: len(rows) for split, rows in test.items()},
        **kind_metadata,
        "warnings": warnings,
    }
    data = TaskData(kind.fit_config(train), train, validation, test, metadata, unlabeled)
    metadata["fingerprint"] = _sha256(data.contents())
    return data


def draw_shots(kind: TaskKind, train: Rows, held_out: Sequence[Rows], shots: int, seed: int) -> tuple[Rows, Rows, Rows]:
    """Returns `shots` rows of each class to train on, as many to select the checkpoint, so that few-shot learning does
    not rely on a large development set (Gao et al. 2021, section 3), and the other training rows. They depend only on
    the seed and the data. All texts are distinct, and no held-out row has the same text. Raises UserError if a class
    has too few rows."""
    held_out_groups = {repr(group) for rows in held_out for group in kind.groups(rows)}
    first: dict[str, int] = {}
    for row, group in enumerate(kind.groups(train)):
        first.setdefault(repr(group), row)
    free = np.array([row for group, row in first.items() if group not in held_out_groups], dtype=np.int64)
    labels = np.asarray(train.labels)[free]
    samples: list[np.ndarray] = []
    for number, name in enumerate(kind.classes):
        members = free[labels == number]
        if len(members) < 2 * shots:
            raise UserError(
                f"task.shots_per_class={shots} requires {2 * shots} training rows of each class with different "
                f"texts; {name} has {len(members)}",
                f"set task.shots_per_class={len(members) // 2} at most"
                if len(members) > 1
                else "use more rows of the class",
            )
        samples.append(members[Permutation(len(members), seed, "sample", _SHOTS + number)(np.arange(2 * shots))])
    train_rows, selection = (
        np.concatenate([rows[part] for rows in samples]) for part in (np.s_[:shots], np.s_[shots:])
    )
    unused_rows = np.setdiff1d(free, np.concatenate([train_rows, selection]))
    return train.take(train_rows), train.take(selection), train.take(unused_rows)


def _few_shots(
    kind: TaskKind, train: Rows, held_out: dict[str, Rows], test: dict[str, Rows], shots: int, seed: int
) -> tuple[Rows, Rows, Rows, JsonObject]:
    train, selection, unused_rows = draw_shots(kind, train, [*held_out.values(), *test.values()], shots, seed)
    hashes = [_sha256([list(rows.columns.values()), _labels(rows)]) for rows in (train, selection)]
    few_shot = {"rows_of_a_class": shots, "seed": seed, "train_sha256": hashes[0], "dev_sha256": hashes[1]}
    short_hashes = " and ".join(digest[:8] for digest in hashes)
    sampled = f"{shots} rows of each class, and {shots} for selection, seed {seed} ({short_hashes})"
    return train, selection, unused_rows, {"few_shot": few_shot, "drawn": sampled}


def unlabeled_rows(config: TaskConfig, cache_dir: str | Path, offline: bool = False) -> dict[str, list[list[str]]]:
    """Returns the text columns of a task's training and development splits, without labels. Raises UserError like
    `load_task`."""
    kind: TaskKind = build(config)
    tables, _ = read_tables(config, cache_dir, offline)
    tests = {*map(canonical, config.test)} - {"train"}
    rows = {
        split: _decode_unlabeled(kind, _columns(config, split, table), table.origin)
        for split, table in tables.items()
        if split not in tests
    }
    return {split: [list(map(cell_text, cells)) for cells in part.columns.values()] for split, part in rows.items()}


def target_rows(config: WindowedConfig, cache_dir: str | Path, offline: bool) -> Rows:
    """Returns the unlabeled texts of a task's target domain. Raises UserError like `load_task`."""
    assert config.domain is not None
    target = config.model_copy(update={"path": config.domain.target})
    try:
        tables, _ = read_tables(target, cache_dir, offline)
        return _decode_unlabeled(build(config), _columns(target, "train", tables["train"]), tables["train"].origin)
    except UserError as error:
        message = error.message.replace("task.path=", "task.domain.target=")
        raise UserError(message, error.hint and error.hint.replace("task.path=", "task.domain.target=")) from error


def _decode_unlabeled(kind: TaskKind, columns: Columns, origin: Origin) -> Rows:
    return kind.rows({name: values for name, values in columns.items() if name != kind.config.label}, origin, False)


def _without_train(
    config: TaskConfig, kind: TaskKind, tables: Mapping[str, TaskTable], metadata: JsonObject
) -> TaskData:
    rows = {split: kind.rows(_columns(config, split, table), table.origin, False) for split, table in tables.items()}
    tests = [split for split in map(canonical, config.test) if split in rows]
    development = {split: part for split, part in rows.items() if split not in tests and part.labels is not None}
    labeled = development or {split: rows[split] for split in tests if rows[split].labels is not None}
    train = next(iter((labeled or rows).values()))
    return TaskData(config, train, labeled, {split: rows[split] for split in tests}, metadata)


def read_tables(
    config: TaskConfig, cache_dir: str | Path, offline: bool, scoring: bool = False
) -> tuple[dict[str, TaskTable], JsonObject]:
    """Returns the tables of a task's splits by canonical name, and metadata of their source: `path`, else `embedded`,
    else `hub`. Dialogues are split into their replies."""
    kind: TaskKind = build(config)  # raises UserError for a group of tasks, before files are searched
    tables, metadata = _source_tables(config, cache_dir, offline, scoring)
    if kind.reads_dialogues:
        without_reply = 0
        for split, table in tables.items():
            columns, origin, short = kind.replies(_columns(config, split, table), table.origin)
            tables[split] = TaskTable(columns, origin, tuple(columns))
            without_reply += short
        metadata["dialogues_without_reply"] = without_reply
    return tables, metadata


def _source_tables(
    config: TaskConfig, cache_dir: str | Path, offline: bool, scoring: bool
) -> tuple[dict[str, TaskTable], JsonObject]:
    if config.path is not None:
        return read_folder(config, scoring)
    if config.embedded is not None:
        splits = pydocs_rows(cache_dir)
        tables = {split: TaskTable(columns, origin, tuple(columns)) for split, (columns, origin) in splits.items()}
        return tables, {"source": config.embedded}
    if config.hub is not None:
        return read_hub(config, cache_dir, offline), {"source": f"hub {config.hub}"}
    raise UserError(
        f"task={config.name} has no default data",
        f"lmtool finetune task={config.name} task.path=FOLDER   (train, dev and test files: .tsv, .csv or .jsonl)",
    )


def _columns(config: TaskConfig, split: str, table: TaskTable) -> dict[str, list]:
    columns = with_joined_columns(config, config.with_aliases(table.columns), table.origin)
    missing = [part for name in config.text for part in joined_columns(name) if not {name, part} & columns.keys()]
    if missing:
        raise UserError(
            f"{_place(table, split)}: no column {missing[0]} to read; there are {', '.join(table.names)}",
            f"name the text with task.text=[{','.join(table.names[: len(config.text)])}], "
            "or the columns of a file without a header line with task.header=[...]",
        )
    if not table.origin:
        raise UserError(f"{_place(table, split)}: no rows", "use a file with rows, or remove it from the folder")
    return columns


def _require_label(config: TaskConfig, split: str, columns: Columns, table: TaskTable) -> None:
    if config.label not in columns:
        raise UserError(
            f"{_place(table, split)}: no column {config.label} to predict; there are {', '.join(table.names)}",
            "name it with task.label=COLUMN",
        )


def _place(table: TaskTable, split: str) -> str:
    return table.origin[0][0] if table.origin else f"split {split}"


def _development_splits(config: TaskConfig, columns: Mapping[str, Columns]) -> list[str]:
    configured = [canonical(split) for split in config.validation]
    missing_splits = [split for split in configured if split not in columns and split[:3] != "dev"]
    if missing_splits:
        available = [split for split in columns if split not in ("train", *map(canonical, config.test))]
        remedy = f"task.validation=[{','.join(available)}]" if available else "omit task.validation="
        raise UserError(
            f"task.validation names the split {missing_splits[0]}; the data have the splits {', '.join(columns)}",
            f"{remedy}, or add a {missing_splits[0]} file to the folder",
        )
    return [split for split in configured if split in columns] or (["dev"] if "dev" in columns else [])


def _hold_out(train: Rows, groups: Sequence[object], seed: int) -> tuple[Rows, Rows]:
    """Holds out a tenth of the groups (distinct texts), so that no text is in both sets."""
    numbers: dict[str, int] = {}
    group_E = np.array([numbers.setdefault(repr(group), len(numbers)) for group in groups])
    if len(numbers) < 2:
        raise UserError(
            f"{train.origin[0][0]}: no development split, and all {len(train)} training rows have the same text",
            "use a folder with a dev file",
        )
    count = min(max(round(HELD_OUT * len(numbers)), 1), len(numbers) - 1)
    held_out = np.isin(group_E, Permutation(len(numbers), seed, "sample", _HOLD_OUT)(np.arange(count)))
    return train.take(np.flatnonzero(~held_out)), train.take(np.flatnonzero(held_out))


def _labels(rows: Rows) -> list[object]:
    return rows.labels.tolist() if isinstance(rows.labels, np.ndarray) else list(rows.labels or ())


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class TaskText:
    """`data=task`: the texts of a task to pretrain on (task-adaptive pretraining, Gururangan et al. 2020, section 4).

    A row is a document, with one line for each column. A text that occurs in several rows (the context of several
    questions) is read only once. The development split is the validation text; if there is none, rows are held out.
    Raises UserError like `load_task`, and if there is too little text.
    """

    def __init__(
        self, config: TaskTextConfig, cache_dir: str | Path, progress: OnStage | None = None, offline: bool = False
    ):
        self._config = config
        texts: dict[str, list[str]] = {"train": [], "validation": []}
        for member in config.task.member_configs():
            for split, columns in unlabeled_rows(member, cache_dir, offline).items():
                texts["train" if split == "train" else "validation"] += _documents(columns)
        self._held_out = not texts["validation"]
        if len(texts["train"]) < 2:
            raise UserError(
                f"data.task={config.task.name}: fewer than two training rows contain text",
                "set data.task.path= to a file with more rows of text",
            )
        if self._held_out:
            is_held_out = held_out(np.array([len(text) for text in texts["train"]]), config.validation_fraction)
            for split, is_member in (("validation", is_held_out), ("train", ~is_held_out)):
                texts[split] = [texts["train"][row] for row in np.flatnonzero(is_member)]
        self._texts = texts
        self.fingerprint = _sha256(texts)

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        for text in self._texts[splits_of(split)]:
            yield from in_parts(text)

    def count(self, split: str) -> int:
        return len(self._texts[splits_of(split)])

    def characters(self, split: str) -> int:
        return sum(map(len, self._texts[splits_of(split)]))

    def metadata(self) -> JsonObject:
        return {
            "source": f"texts of {', '.join(member.name for member in self._config.task.member_configs())}",
            "bytes": sum(len(text.encode()) for texts in self._texts.values() for text in texts),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": "row",
            "held_out": self._held_out,
            "fingerprint": self.fingerprint,
        }


def _documents(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    texts: set[str] = set()
    for row in zip(*columns, strict=True):
        unread = [text for text in dict.fromkeys(row) if text.strip() and text not in texts]
        texts.update(unread)
        if unread:
            yield "\n".join(unread)
