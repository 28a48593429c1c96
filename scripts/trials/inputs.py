"""Tables and plain text with one fault at a known position, and legal ones that look wrong.

The error for a fault names file and line, whatever the file is used for. A legal file is read exactly as written.
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
from tests.commands.conftest import BAD, GOOD, sentence, write_text
from trials.harness import ended, require_refusal, require_success, typed
from trials.outcomes import Failed, Outcome, Verdict, chance_of, kind, planted
from trials.stage import HERE, ROWS, TEXT, VOCABULARY, copy, last_of_each, replaced

Change = Callable[[bytes], bytes]
_BYTES = {
    "a NUL byte": b"\0",
    "a byte that is not UTF-8": b"\xff",
    "a cut UTF-8 sequence": b"\xe2\x82 ",
    "a surrogate in UTF-8": b"\xed\xa0\x80",
    "an overlong form": b"\xc0\xaf",
}
"""Refused with their line and byte."""
_WHOLE: dict[str, Change] = {
    "nothing": lambda content: b"",
    "white space": lambda content: b" \n\t\r\n\x0c\n" * 50,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "UTF-32, big end first": lambda content: b"\x00\x00\xfe\xff" + content.decode().encode("utf-32-be"),
    "gzip's first bytes": lambda content: b"\x1f\x8b\x08\x00" + content,
    "a picture's first bytes": lambda content: b"\x89PNG\r\n" + content,
}
"""Refused with the name of the file."""
_SAME: dict[str, Change] = {
    "a mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "CR": lambda content: content.replace(b"\n", b"\r"),
    "no last line end": lambda content: content.rstrip(b"\n"),
}
"""Other encodings of the same text, which must be read identically."""

# --- tables -----------------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]
FORMATS = ("tsv", "csv", "jsonl")
TABLE_ROLES = ("predict", "dev", "train", "number", "corpus")


@dataclass
class Table:
    """The content of a file. line: the line of the fault, from 1; 0 if the whole file is refused; None if the table is
    legal and must be read as `rows`."""

    rows: Rows
    content: bytes
    line: int | None


def written(rows: Rows, form: str) -> bytes:
    """A valid file with the columns sentence and label. TSV texts are not escaped."""
    out = io.StringIO()
    if form == "jsonl":
        out.writelines(json.dumps({"sentence": text, "label": label}) + "\n" for text, label in rows)
    elif form == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([("sentence", "label"), *rows])
    else:
        out.writelines(f"{text}\t{label}\n" for text, label in [("sentence", "label"), *rows])
    return out.getvalue().encode("utf-8", "surrogatepass")


_LINE: dict[str, tuple[tuple[str, ...], Change]] = {
    **{name: (FORMATS, lambda line, raw=raw: line[:3] + raw + line[3:]) for name, raw in _BYTES.items()},
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
"""Faults in rows of a task that are legal in text for pretraining."""
_LABEL = ("7", "", "-", "1.5x", "one", "１", "0 1")
"""Labels that no training row has."""
_NAMES = {"0": "negative", "1": "positive"}  # the task's labels by their numbers in the rows
_NUMBER = ("nan", "inf", "-Infinity", "1e999", "1,5", "0x10", "", "x", "1 2", "--1")
"""Values that are not finite numbers."""
_WHOLE_TABLE: dict[str, Change] = _WHOLE | {
    "white space": lambda content: b" \n\n\t\n",
    "parquet's first bytes": lambda content: b"PAR1" + content,
    "another column name": lambda content: content.replace(b"sentence", b"sentense"),
    "the header alone": lambda content: content[: content.index(b"\n") + 1] if content[:1] != b"{" else b"",
}
_SAME_TABLE: dict[str, Change] = _SAME | {
    "blank lines": lambda content: content.replace(b"\n", b"\n\n"),
    "blank lines at the end": lambda content: content + b"\n\n\n",
}
# Legal in any format that can represent them.
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
    """The name of a fault, or of an unusual but legal feature, and a table that has it."""
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
        name = chance.choice(list(_WHOLE_TABLE))
        return name, Table(rows, _WHOLE_TABLE[name](clean), 0)
    if kind == "text":
        text = chance.choice(_TEXTS)
        if form == "jsonl" and chance.random() < 0.5:
            text += "\nsecond line\r\tand a tab"
        elif form == "csv" and chance.random() < 0.5:
            text += "\nsecond line, and a comma"
        rows[number] = (text, rows[number][1])
        return f"the text {text[:40]!r}", Table(rows, written(rows, form), None)
    if kind == "shape":
        name = chance.choice(list(_SAME_TABLE))
        return name, Table(rows, _SAME_TABLE[name](clean), None)
    legal = _LEGAL_TEXT if role == "corpus" else ()
    name = chance.choice([name for name, (forms, _) in _LINE.items() if form in forms and name not in legal])
    lines = clean.split(b"\n")
    lines[line - 1] = _LINE[name][1](lines[line - 1])
    content = b"\n".join(lines)
    if chance.random() < 0.3:  # line ends do not change the number of the faulty line
        name, content = f"{name}, with CRLF", content.replace(b"\r", b"\n" if "return" in name else b"")
        lines = content.split(b"\n")
        content = b"\r\n".join(lines)
    if chance.random() < 0.2:
        name, content = f"{name}, with a mark", b"\xef\xbb\xbf" + content
    return name, Table(rows, content, line)


@kind("tables", trials=240)
def tables(stage: Path, place: Path, seed: int) -> Verdict:
    """Reads a table with one fault, or a legal one that looks wrong."""
    chance = chance_of("tables", seed)
    form, role = FORMATS[seed % 3], TABLE_ROLES[seed // 3 % len(TABLE_ROLES)]
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
    own_rows = replaced(ROWS, "task.path=table")
    words = {
        "predict": ["predict", "checkpoint=done/tuned", *HERE, f"input=table/dev.{form}", "output=out.jsonl"],
        "dev": ["evaluate", "checkpoint=done/tuned", "task.path=table", *HERE, "output=out.jsonl"],
        "train": ["finetune", *own_rows, "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "number": ["finetune", *replaced(own_rows, "task=custom"), "task.kind=regression", "task.text=[sentence]",
                   "task.label=label", "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "corpus": [*replaced(VOCABULARY, f"data={_source(form)}", f"data.path=table/{file.name}"),
                   "data.text=sentence"],
    }[role]  # fmt: skip
    shape = f"{role}, {form}, line {table.line}: {name}"
    with planted(shape):
        answer = typed(place, *words, clean=True)
        # An error about two lines that differ names the second one first.
        where = [f"{file.name}:{table.line}", f"than line {table.line}"] if table.line else [file.name, "sentence"]
        if table.line is None:
            require_success(answer, "a legal table is refused: ")
            _compare_rows(place, role, table)
            return Verdict(Outcome.DONE, shape)
        require_refusal(answer, *where)
    return ended(answer, shape)


def _source(form: str) -> str:
    """The data source that reads files of a format."""
    return "jsonl" if form == "jsonl" else "csv"


def _compare_rows(place: Path, role: str, table: Table) -> None:
    """Raises Failed if the rows read differ from the rows written."""
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
            Outcome.SILENT, f"{len(read)} rows for {len(wanted)}; the first difference {str(different[:1])[:200]}"
        )
    gold = [row.get("gold") for row in read]
    if role == "dev" and gold != labels:
        raise Failed(Outcome.SILENT, f"gold labels {gold[:8]}")
    if role == "number" and gold != [float(label) for _, label in table.rows]:
        raise Failed(Outcome.SILENT, f"gold values {gold[:8]}")


# --- texts ------------------------------------------------------------------------------------------------------------

TEXT_ROLES = ("data.path", "data.validation", "folder", "input", "tokenizer", "inspect")
_SAME_TEXT = _SAME | {"blank lines around": lambda content: b"\n\n\n" + content + b"\n\n \n"}
_ODD = (
    "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\x1b[31m", "\x07", "\u202e", "\u200b",
    "\ufeff", "e\u0301\u0302\u0303", "\U0001f469\u200d\U0001f4bb", "[MASK] [CLS] [SEP] [PAD]",
    "<|endoftext|> </s> <pad>", "\t" * 50,
    "x" * 400_000, "a " * 100_000, "\u3000", "\ud7ff", "\U0010ffff", "=1+1", "../../..", "%s{0}$(touch ran)",
)  # fmt: skip
"""Legal in any text; none ends a line."""


@kind("texts", trials=120)
def texts(stage: Path, place: Path, seed: int) -> Verdict:
    """Reads plain text with one fault, or legal text that looks wrong."""
    chance = chance_of("texts", seed)
    role = TEXT_ROLES[seed % len(TEXT_ROLES)]
    copy(stage, place, "done/tuned", "text.txt")
    if role == "input":
        return _input(place, chance)
    clean = (place / "text.txt").read_bytes()
    kind = chance.choices(("byte", "whole", "same", "odd"), (40, 20, 20, 20))[0]
    where, same = None, False
    if kind == "byte":
        name = chance.choice(list(_BYTES))
        lines = clean.split(b"\n")
        number = chance.choice([number for number, line in enumerate(lines) if line])
        at = chance.randrange(len(lines[number]))
        lines[number] = lines[number][:at] + _BYTES[name] + lines[number][at:]
        end = chance.choice((b"\n", b"\r\n", b"\r"))
        content, where = end.join(lines), f"odd.txt:{number + 1}:{at + 1}:"
        name += f" at {number + 1}:{at + 1}, lines end in {end!r}"
    elif kind == "whole":
        name = chance.choice(list(_WHOLE))
        content = _WHOLE[name](clean)
        # An empty file in a folder is legal.
        where = None if role == "folder" and not content.strip() else "odd.txt"
    elif kind == "same":
        name, same = chance.choice(list(_SAME_TEXT)), True
        content = _SAME_TEXT[name](clean)
    else:
        odd = chance.choice(_ODD)
        name = f"{odd[:20]!r}"
        at = chance.randrange(len(clean))
        content = clean[:at] + odd.encode() + clean[at:]
    return _corpus(place, role, name, content, where, same)


def _corpus(place: Path, role: str, name: str, content: bytes, where: str | None, same: bool) -> Verdict:
    """Uses the content as training text. where: the error must contain it; same: whether it encodes the clean text."""
    folder = place / "texts"
    folder.mkdir()
    (folder / "odd.txt").write_bytes(content)
    path = "texts/odd.txt"
    if role == "folder":
        write_text(folder / "plain.txt")
        path = "texts"
    words = ["pretrain", *TEXT, "max_steps=1", "run_dir=run", f"data.path={path}"]
    if role == "data.validation":
        words = [*words[:-1], "data.path=text.txt", f"data.validation={path}"]
    elif role == "tokenizer":
        words = [*replaced(VOCABULARY, f"data.path={path}")]
    elif role == "inspect":
        words = ["inspect", "pretrain", *TEXT, f"data.path={path}", "n=20", "tokens=5000", "output=seen.jsonl"]
    words = last_of_each(words)
    with planted(f"{role}: {name}"):
        answer = typed(place, *words, clean=True)
        if where is not None:
            require_refusal(answer, where)
        # inspect exits with 3 if an unusual text changes the fractions of tokens that it measures.
        elif not (role == "inspect" and answer.status == 3):
            require_success(answer, "a legal text is refused: ")
        if same and role == "inspect":
            _compare_examples(place, words)
    return ended(answer, f"{role}: {name}")


def _compare_examples(place: Path, words: list[str]) -> None:
    seen = (place / "seen.jsonl").read_bytes()
    typed(place, *(word.replace("texts/odd.txt", "text.txt") for word in words))
    if (place / "seen.jsonl").read_bytes() != seen:
        raise Failed(Outcome.SILENT, "the model reads other examples than from the clean text")


def _input(place: Path, chance: random.Random) -> Verdict:
    """Runs `predict input=`, which reads each line as one row."""
    lines = [f"the lovely cat saw the {number}" for number in range(6)]
    number = chance.randrange(6)
    end = chance.choice((b"\n", b"\r\n", b"\r"))
    mark = chance.choice((b"", b"\xef\xbb\xbf"))
    stdin = chance.random() < 0.3
    file = "-" if stdin else "lines.txt"
    if chance.random() < 0.4:
        name = chance.choice(list(_BYTES))
        raw = [line.encode() for line in lines]
        raw[number] = raw[number][:4] + _BYTES[name] + raw[number][4:]
        where: str | None = f"{'standard input' if stdin else file}:{number + 1}"
    else:
        odd = chance.choice(_ODD)
        name, where = f"{odd[:20]!r}", None
        lines[number] = lines[number][:4] + odd + lines[number][4:]
        raw = [line.encode() for line in lines]
    content = mark + end.join(raw) + end
    (place / "lines.txt").write_bytes(content)
    shape = f"input={file}: {name} on line {number + 1}, lines end in {end!r}"
    words = ["predict", "checkpoint=done/tuned", *HERE, f"input={file}"]
    with planted(shape):
        typed(place, *words, stdin=content)  # printed text must not contain control characters
        answer = typed(place, *words, "output=out.jsonl", stdin=content)
        if where is not None:
            require_refusal(answer, where, where.replace("standard input", "-"))
            return ended(answer, shape)
        require_success(answer, "a legal text is refused: ")
        rows = [json.loads(line)["sentence"] for line in (place / "out.jsonl").read_text().split("\n") if line]
        if rows != lines:
            raise Failed(Outcome.SILENT, f"{len(rows)} rows for {len(lines)} lines, or different texts")
    return Verdict(Outcome.DONE, shape)
