"""Tables with one fault planted on a known line, and tables that only look wrong.

A fault is refused with file and line. What is legal is read as it stands: the rows that come out are those that were
written.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmtool.config.tables import build, lookup
from lmtool.data.sources import documents
from tests.commands.conftest import BAD, GOOD, sentence
from trials.commands import files_in, nothing_left, refused, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.stage import HERE, ROWS, copy

Rows = list[tuple[str, str]]
FORMATS = ("tsv", "csv", "jsonl")
ROLES = ("predict", "dev", "train", "number", "corpus")


@dataclass
class Table:
    """A file as it will be written. line: where the fault stands, counted from 1; None: the table is legal, and `rows`
    are what must come out; 0: the whole file is refused, at no line. either: refused or read right."""

    rows: Rows
    content: bytes
    line: int | None
    either: bool = False


def written(rows: Rows, form: str) -> bytes:
    """The rows as a clean file, columns sentence and label; of tsv, without what it cannot hold."""
    out = io.StringIO()
    if form == "jsonl":
        out.writelines(json.dumps({"sentence": text, "label": label}) + "\n" for text, label in rows)
    elif form == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([("sentence", "label"), *rows])
    else:
        out.writelines(f"{text}\t{label}\n" for text, label in [("sentence", "label"), *rows])
    return out.getvalue().encode("utf-8", "surrogatepass")


# --- faults: each takes the clean lines and one of them, and gives the lines back ------------------------------------

Lines = list[bytes]
_LINE: dict[str, tuple[tuple[str, ...], Callable[[bytes], bytes]]] = {
    "a NUL byte": (FORMATS, lambda line: line[:3] + b"\0" + line[3:]),
    "bytes that are not UTF-8": (FORMATS, lambda line: line[:3] + b"\xff\xfe" + line[3:]),
    "a cut UTF-8 sequence": (FORMATS, lambda line: line[:3] + b"\xe2\x82" + line[3:]),
    "a surrogate in UTF-8": (FORMATS, lambda line: line[:3] + b"\xed\xa0\x80" + line[3:]),
    "a lone carriage return": (("tsv", "jsonl"), lambda line: line[:5] + b"\r" + line[5:]),
    "a column too many": (("tsv",), lambda line: line + b"\tmore"),
    "a cell too many": (("csv",), lambda line: line + b",more"),
    "a column too few": (("tsv", "csv"), lambda line: line.replace(b"\t", b" ").replace(b",", b" ")),
    "an unclosed quote": (("csv",), lambda line: b'"' + line),
    "text behind a closed quote": (("csv",), lambda line: b'"a" b' + line[line.rindex(b",") :]),
    "half an object": (("jsonl",), lambda line: line[: len(line) // 2]),
    "a list": (("jsonl",), lambda line: b"[1, 2]"),
    "a number": (("jsonl",), lambda line: b"3"),
    "a key twice": (("jsonl",), lambda line: line[:-1] + b', "label": "0"}'),
    "a further key": (("jsonl",), lambda line: line[:-1] + b', "more": 1}'),
    "a missing key": (("jsonl",), lambda line: b'{"label": "0"}'),
    "a comma too many": (("jsonl",), lambda line: line[:-1] + b",}"),
    "single quotes": (("jsonl",), lambda line: line.replace(b'"', b"'")),
    "two objects": (("jsonl",), lambda line: line + b" " + line),
    "NaN": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": NaN, "x": "')),
    "an object within": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": {"a": 1}, "x": "')),
    "null for a text": (("jsonl",), lambda line: b'{"sentence": null, "label": "0"}'),
    "a list for a text": (("jsonl",), lambda line: b'{"sentence": ["a"], "label": "0"}'),
    "depth": (("jsonl",), lambda line: b'{"sentence": ' + b"[" * 100_000 + b"]" * 100_000 + b', "label": "0"}'),
    "thousands of digits": (("jsonl",), lambda line: b'{"sentence": ' + b"9" * 6000 + b', "label": "0"}'),
    "a high surrogate alone": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": "\\ud83d')),
    "a low surrogate alone": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": "\\ude00 x')),
}
_LEGAL_TEXT = ("a further key", "null for a text")
"""Faults of a task's rows that text to pretrain on may have: other keys, and rows without text, which are counted."""
_LABEL = ("7", "", "-", "1.5x", "one", "１", "0 1")
"""What stands for a label of development rows that no training row has."""
_NAMES = {"0": "negative", "1": "positive"}  # the task's labels, which the rows name by their numbers
_NUMBER = ("nan", "inf", "-Infinity", "1e999", "1,5", "0x10", "", "x", "1 2", "--1")
"""What stands for a number and is none, or not a finite one."""
_WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "white space": lambda content: b" \n\n\t\n",
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "UTF-32": lambda content: content.decode().encode("utf-32"),
    "gzip's first bytes": lambda content: b"\x1f\x8b\x08\x00" + content,
    "parquet's first bytes": lambda content: b"PAR1" + content,
    "another column name": lambda content: content.replace(b"sentence", b"sentense"),
    "the header alone": lambda content: content[: content.index(b"\n") + 1] if content[:1] != b"{" else b"",
}
# Texts that are legal wherever the format can hold them.
_TEXTS = (
    "\u2028line separator", "next\x85line", "form\x0cfeed", "vertical\x0btab", "file\x1cseparator", "NA", "null",
    "None", "nan", "-1", "true", "  spaces around  ", 'say "hi" to', "it's", "'", '""', "=1+1", "#", "\\", "\\n", "a,b",
    "<b>&amp;",
    "[MASK]", "[CLS] [SEP]", "\U0001f600", "e\u0301 \u202e rtl", "\ufeff mark", "x" * 300_000, "\x1b[31mred", "\x07",
    "漢字", "\u00a0", "\ud7ff\ue000", "{", "a=b", "$(touch ran)", "`touch ran`", "%s %n {0}",
)  # fmt: skip


def _rows(chance: random.Random, count: int) -> Rows:
    rows = [(sentence(chance, (BAD, GOOD)[number % 2]), str(number % 2)) for number in range(count)]
    return list(dict(rows).items())


def plant(chance: random.Random, form: str, role: str) -> tuple[str, Table]:
    """A table of some rows with one fault, or with something odd that is legal; and what it is."""
    rows = _rows(chance, chance.choice((3, 12, 40)))
    if role == "number":
        rows = [(text, f"{number / 7:.3f}") for number, (text, _) in enumerate(rows)]
    clean = written(rows, form)
    number = chance.randrange(len(rows))
    line = number + (1 if form == "jsonl" else 2)
    kind = chance.choices(("line", "label", "whole", "text", "shape"), (45, 10, 15, 20, 10))[0]
    if kind == "label" and role in ("dev", "number"):
        label = chance.choice(_NUMBER if role == "number" else _LABEL)
        rows[number] = (rows[number][0], label)
        return f"the label {label!r}", Table(rows, written(rows, form), line)
    if kind == "whole":
        name = chance.choice(list(_WHOLE))
        return name, Table(rows, _WHOLE[name](clean), 0)
    if kind == "text":
        text = chance.choice(_TEXTS)
        if form == "jsonl" and chance.random() < 0.5:
            text += "\nsecond line\r\tand a tab"
        elif form == "csv" and chance.random() < 0.5:
            text += "\nsecond line, and a comma"
        rows[number] = (text, rows[number][1])
        return f"the text {text[:40]!r}", Table(rows, written(rows, form), None)
    if kind == "shape":
        name, content = _shape(chance, clean)
        return name, Table(rows, content, None)
    legal = _LEGAL_TEXT if role == "corpus" else ()
    name = chance.choice([name for name, (forms, _) in _LINE.items() if form in forms and name not in legal])
    lines = clean.split(b"\n")
    lines[line - 1] = _LINE[name][1](lines[line - 1])
    content = b"\n".join(lines)
    if chance.random() < 0.3:  # what stands around a fault does not move its line
        name, content = f"{name}, with CRLF", content.replace(b"\r", b"\n" if "return" in name else b"")
        lines = content.split(b"\n")
        content = b"\r\n".join(lines)
    if chance.random() < 0.2:
        name, content = f"{name}, with a mark", b"\xef\xbb\xbf" + content
    return name, Table(rows, content, line)


def _shape(chance: random.Random, clean: bytes) -> tuple[str, bytes]:
    """A clean file in other clothes."""
    shapes = {
        "a mark": b"\xef\xbb\xbf" + clean,
        "CRLF": clean.replace(b"\n", b"\r\n"),
        "CR": clean.replace(b"\n", b"\r"),
        "no last line end": clean.removesuffix(b"\n"),
        "blank lines": clean.replace(b"\n", b"\n\n"),
        "blank lines at the end": clean + b"\n\n\n",
    }
    name = chance.choice(list(shapes))
    return name, shapes[name]


# --- the trial ------------------------------------------------------------------------------------------------------


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("tables", seed)
    form, role = FORMATS[seed % 3], ROLES[seed // 3 % len(ROLES)]
    name, table = plant(chance, form, role)
    copy(stage, place, "done/tuned", "done/pre")
    folder = place / "table"
    folder.mkdir()
    split = "train" if role == "train" else "dev"
    file = folder / f"{split}.{form}"
    file.write_bytes(table.content)
    other = _rows(chance_of("other", 0), 40)
    if role == "number":
        other = [(text, "0.5") for text, _ in other]
        other[0] = (other[0][0], "1.5")
    if role not in ("predict", "corpus"):
        (folder / f"{'dev' if split == 'train' else 'train'}.jsonl").write_bytes(written(other, "jsonl"))
    words = {
        "predict": ["predict", "checkpoint=done/tuned", *HERE, f"input=table/dev.{form}", "output=out.jsonl"],
        "dev": ["evaluate", "checkpoint=done/tuned", "task.path=table", *HERE, "output=out.jsonl"],
        "train": ["finetune", *_with_path(ROWS), "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "number": ["finetune", *_with_path(ROWS), "task=custom", "task.kind=regression", "task.text=[sentence]",
                   "task.label=label", "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "corpus": ["tokenizer", f"data={_source(form)}", f"data.path=table/{file.name}", "data.text=sentence",
                   "cache_dir=cache", "output=vocabulary", "tokenizer=wordpiece", "tokenizer.vocab_size=300"],
    }[role]  # fmt: skip
    if role == "number":
        words.remove("task=sst2")
    before = files_in(place)
    shape = f"{role}, {form}, line {table.line}: {name}"
    with planted(shape):
        answer = typed(place, *words)
        nothing_left(place, before, answer)
        # Of two lines that differ, the second is named first.
        where = [f"{file.name}:{table.line}", f"than line {table.line}"] if table.line else [file.name, "sentence"]
        if table.line is None:
            if answer.status:
                raise Failed(Outcome.DEAD_END, f"a legal table is refused: {answer.errors[:300]}")
            _compare(place, role, table)
            return Verdict(Outcome.DONE, shape)
        if not refused(answer, *where):
            raise Failed(Outcome.SILENT, "read without a word")
    return Verdict(Outcome.REFUSED, f"{shape}: {answer.errors[:120]}")


def _with_path(words: list[str]) -> list[str]:
    return [word.replace("task.path=rows", "task.path=table") for word in words]


def _source(form: str) -> str:
    """The source of text that reads files of a form."""
    return "jsonl" if form == "jsonl" else "csv"


def _compare(place: Path, role: str, table: Table) -> None:
    """Raises Failed where the rows that were read are not those that were written."""
    if role == "corpus":
        (file,) = (place / "table").glob("dev.*")
        entry = lookup("data", _source(file.suffix[1:]))
        source = build(entry.config(path=str(file), text="sentence")).complete()
        read, wanted = list(documents(source.parts("validation"))), [text for text, _ in table.rows if text.strip()]
        if read != wanted:
            different = [pair for pair in zip(wanted, read, strict=False) if pair[0] != pair[1]]
            raise Failed(Outcome.SILENT, f"{len(read)} texts for {len(wanted)}: {str(different[:1])[:200]}")
        return
    labels = [_NAMES.get(label, label) for _, label in table.rows]
    if role == "train":
        seen = json.loads((place / "run" / "facts.json").read_text())["data"]["labels"]
        if seen != {name: labels.count(name) for name in _NAMES.values()}:
            raise Failed(Outcome.SILENT, f"labels {seen}")
        return
    path = place / ("run/predictions.jsonl" if role == "number" else "out.jsonl")
    read = [json.loads(line) for line in path.read_text().split("\n") if line]
    wanted = [text for text, _ in table.rows]
    if [row["sentence"] for row in read] != wanted:
        different = [
            (text, row["sentence"]) for text, row in zip(wanted, read, strict=False) if row["sentence"] != text
        ]
        raise Failed(
            Outcome.SILENT, f"{len(read)} rows for {len(wanted)}; the first other one {str(different[:1])[:200]}"
        )
    gold = [row.get("gold") for row in read]
    if role == "dev" and gold != labels:
        raise Failed(Outcome.SILENT, f"gold labels {gold[:8]}")
    if role == "number" and gold != [float(label) for _, label in table.rows]:
        raise Failed(Outcome.SILENT, f"gold values {gold[:8]}")


KIND = Kind("tables", "tables with one fault, or that only look wrong", trials=240, draw=2, trial=_trial)
