"""Sentences of words in columns, read strictly: CoNLL's, a word a line, and CoNLL-U (universaldependencies.org)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmtool.data.files import read_lines
from lmtool.data.problems import refuse
from lmtool.data.tables import Table
from lmtool.errors import UserError

LINES = "#lines"
"""The column of the lines that the words of a row stand on."""
DOCUMENT = "-DOCSTART-"
CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""The ten columns of CoNLL-U."""
_SPACES = re.compile("[ \t]+")
_SPANNING = re.compile(r"\d+-\d+|\d+\.\d+")


def read_columns(
    path: Path, word: str, label: str, header: Sequence[str] | None = None, skip_ragged: bool = False
) -> Table:
    """A row a sentence: lists of words, of labels, and of what further columns hold, by name.

    Columns are divided by tabs where the first word's line has one, else by spaces. A line of nothing but white space
    ends a sentence, and so does a -DOCSTART- line, which is counted. header: the columns' names in order; None: the
    first is `word`, the last `label`; a file of one column has no labels. skip_ragged: leave out and count sentences
    that have a line of another number of columns. The origin is the line of a sentence's first word.

    UserError with file:line: another number of columns than the first line has, or an empty word.
    """
    table, names, tabs, documents = Table({}), list(header or ()), None, 0
    for sentence in _sentences(path):
        number, first = sentence[0]
        if first.startswith(DOCUMENT):
            documents += 1
            continue
        tabs = "\t" in first if tabs is None else tabs
        names = names or _names(word, label, len(_cells(first, tabs)))
        cells = [_cells(line, tabs) for _, line in sentence]
        ragged = [place for place, values in enumerate(cells) if len(values) != len(names)]
        if ragged and skip_ragged:
            table.skipped += 1
            continue
        if ragged:
            refuse(_wrong_count(path, sentence[ragged[0]][0], cells[ragged[0]], names, header is not None))
            continue
        empty = [] if word not in names else [not values[names.index(word)] for values in cells]
        if any(empty):
            line = sentence[empty.index(True)][0]
            refuse(UserError(f"{path}:{line}: an empty word", "write the word, or take the line out"))
            continue
        _append(table, path, names, cells, [number for number, _ in sentence])
    if not table:
        raise UserError(f"{path}: no sentences", "give a file of a word a line and a blank line behind each sentence")
    if documents:
        table.facts["document_lines"] = documents
    return table


def read_conllu(path: Path, word: str) -> Table:
    """A row a sentence: lists of what the columns hold by their names in lower case, the forms under `word`.

    Ranges of words written as one (1-2) and empty nodes (1.1) are left out and counted. `id` is the sentence's
    sent_id, where all have one. UserError with file:line where a line has not ten columns or words are not numbered 1,
    2, ...
    """
    table, left_out = Table({}), 0
    names = [LINES if name == "id" else word if name == "form" else name for name in CONLLU]
    ids: list[str] = []
    for sentence in _sentences(path):
        comments = [line[1:].partition("=") for _, line in sentence if line.startswith("#")]
        cells: list[list[str]] = []
        lines: list[int] = []
        for number, line in sentence:
            if line.startswith("#"):
                continue
            values = line.split("\t")
            if len(values) != len(CONLLU):
                raise _wrong_count(path, number, values, CONLLU, False)
            if _SPANNING.fullmatch(values[0]):
                left_out += 1
                continue
            if values[0] != str(len(cells) + 1):
                raise UserError(
                    f"{path}:{number}: the word's number is {values[0]}, {len(cells) + 1} expected",
                    "number the words of each sentence from 1, and put a blank line behind each",
                )
            cells.append(values)
            lines.append(number)
        if cells:
            _append(table, path, names, cells, lines)
            ids += [value.strip() for key, _, value in comments if key.strip() == "sent_id"]
    if not table:
        raise UserError(f"{path}: no sentences", "give a file in CoNLL-U: ten columns divided by tabs")
    if len(ids) == len(table):
        table.columns["id"] = list(ids)
    if left_out:
        table.facts["ranges_and_empty_nodes"] = left_out
    return table


def _sentences(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Runs of lines with their numbers, divided by lines of white space. A -DOCSTART- line is a run of its own."""
    run: list[tuple[int, str]] = []
    for number, line in read_lines(path):
        document = line.startswith(DOCUMENT)
        if line.strip() and not document:
            run.append((number, line))
            continue
        if run:
            yield run
        run = []
        if document:
            yield [(number, line)]
    if run:
        yield run


def _cells(line: str, tabs: bool) -> list[str]:
    return line.split("\t") if tabs else _SPACES.split(line.strip(" \t"))


def _names(word: str, label: str, count: int) -> list[str]:
    """The first column is the word, the last the label; those between go by their number from 1."""
    return [word] if count == 1 else [word, *(f"column_{number}" for number in range(2, count)), label]


def _append(table: Table, path: Path, names: Sequence[str], cells: list[list[str]], lines: list[int]) -> None:
    """A sentence as a row. Its lines take the place of a column of that name: CoNLL-U's numbers of words."""
    columns = {**dict(zip(names, zip(*cells, strict=True), strict=True)), LINES: lines}
    for name, values in columns.items():
        table.columns.setdefault(name, []).append(list(values))
    table.origin.append((str(path), lines[0]))


def _wrong_count(path: Path, number: int, values: list[str], names: Sequence[str], given: bool) -> UserError:
    hint = "write a word a line, with the same columns on each, and a blank line behind each sentence"
    if given:
        hint = "name all columns of the file in order: task.header=[...]"
    count = f"{len(values)} column" + ("s" if len(values) != 1 else "")
    return UserError(f"{path}:{number}: {count}, {len(names)} expected ({', '.join(names)})", hint)
