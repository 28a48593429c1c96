"""Tables and plain text with one fault at a known position, and legal files that look wrong.

The error for a fault must name the file and the line, whatever the file is used for. A legal file must be read exactly
as it was written.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmtool.config.registry import build, lookup
from lmtool.data.sources import documents
from tests.commands.conftest import BAD, GOOD, sentence, write_text
from tests.faults.harness import refused_or_done, require_refusal, require_success, run_lmtool
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import HERE, ROWS, TEXT, VOCABULARY, copy, last_overrides, with_overrides

Change = Callable[[bytes], bytes]
_INVALID_BYTES = {
    "a NUL byte": b"\0",
    "a byte that is not UTF-8": b"\xff",
    "a truncated UTF-8 sequence": b"\xe2\x82 ",
    "a surrogate in UTF-8": b"\xed\xa0\x80",
    "an overlong form": b"\xc0\xaf",
}
"""Bytes that must be refused with their line and position."""
_INVALID_FILES: dict[str, Change] = {
    "nothing": lambda content: b"",
    "white space": lambda content: b" \n\t\r\n\x0c\n" * 50,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "big-endian UTF-32": lambda content: b"\x00\x00\xfe\xff" + content.decode().encode("utf-32-be"),
    "gzip's first bytes": lambda content: b"\x1f\x8b\x08\x00" + content,
    "a picture's first bytes": lambda content: b"\x89PNG\r\n" + content,
}
"""Contents of a whole file that must be refused with the name of the file."""
_EQUIVALENT: dict[str, Change] = {
    "a mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "CR": lambda content: content.replace(b"\n", b"\r"),
    "no last line end": lambda content: content.rstrip(b"\n"),
}
"""Other encodings of the same text, which must give the same result."""

# --- tables -----------------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]
FORMATS = ("tsv", "csv", "jsonl")
TABLE_ROLES = ("predict", "dev", "train", "number", "corpus")


@dataclass
class Table:
    """A file with rows.

    Attributes:
        rows: the rows before the fault was planted
        content: the content of the file
        line: the line of the fault, from 1; 0 if the whole file must be refused; None if the file is legal, so that
            exactly `rows` must be read from it
    """

    rows: Rows
    content: bytes
    line: int | None


def encode_rows(rows: Rows, file_format: str) -> bytes:
    """Returns the content of a valid file with the columns sentence and label. TSV texts are not escaped."""
    out = io.StringIO()
    if file_format == "jsonl":
        out.writelines(json.dumps({"sentence": text, "label": label}) + "\n" for text, label in rows)
    elif file_format == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([("sentence", "label"), *rows])
    else:
        out.writelines(f"{text}\t{label}\n" for text, label in [("sentence", "label"), *rows])
    return out.getvalue().encode("utf-8", "surrogatepass")


_INVALID_LINES: dict[str, tuple[tuple[str, ...], Change]] = {
    **{name: (FORMATS, lambda line, raw=raw: line[:3] + raw + line[3:]) for name, raw in _INVALID_BYTES.items()},
    "a lone carriage return": (("tsv", "jsonl"), lambda line: line[:5] + b"\r" + line[5:]),
    "an extra column": (("tsv",), lambda line: line + b"\tmore"),
    "an extra cell": (("csv",), lambda line: line + b",more"),
    "a missing column": (("tsv", "csv"), lambda line: line.replace(b"\t", b" ").replace(b",", b" ")),
    "an unclosed quote": (("csv",), lambda line: b'"' + line),
    "text after a closing quote": (("csv",), lambda line: b'"a" b' + line[line.rindex(b",") :]),
    "half an object": (("jsonl",), lambda line: line[: len(line) // 2]),
    "a list": (("jsonl",), lambda line: b"[1, 2]"),
    "a number": (("jsonl",), lambda line: b"3"),
    "a repeated key": (("jsonl",), lambda line: line[:-1] + b', "label": "0"}'),
    "an additional key": (("jsonl",), lambda line: line[:-1] + b', "more": 1}'),
    "a missing key": (("jsonl",), lambda line: b'{"label": "0"}'),
    "an extra comma": (("jsonl",), lambda line: line[:-1] + b",}"),
    "single quotes": (("jsonl",), lambda line: line.replace(b'"', b"'")),
    "two objects": (("jsonl",), lambda line: line + b" " + line),
    "NaN": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": NaN, "x": "')),
    "a nested object": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": {"a": 1}, "x": "')),
    "null for a text": (("jsonl",), lambda line: b'{"sentence": null, "label": "0"}'),
    "a list for a text": (("jsonl",), lambda line: b'{"sentence": ["a"], "label": "0"}'),
    "depth": (("jsonl",), lambda line: b'{"sentence": ' + b"[" * 100_000 + b"]" * 100_000 + b', "label": "0"}'),
    "thousands of digits": (("jsonl",), lambda line: b'{"sentence": ' + b"9" * 6000 + b', "label": "0"}'),
    "a lone high surrogate": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": "\\ud83d')),
    "a lone low surrogate": (("jsonl",), lambda line: line.replace(b'"sentence": "', b'"sentence": "\\ude00 x')),
}
_LEGAL_IN_CORPORA = ("an additional key", "null for a text")
"""Faults in the rows of a task that are legal in data for pretraining."""
_UNKNOWN_LABELS = ("7", "", "-", "1.5x", "one", "１", "0 1")
"""Labels that no training row has."""
_CLASS_NAMES = {"0": "negative", "1": "positive"}  # the names of the task's classes by the labels in the rows
_INVALID_NUMBERS = ("nan", "inf", "-Infinity", "1e999", "1,5", "0x10", "", "x", "1 2", "--1")
"""Values that are not finite numbers."""
_INVALID_TABLES: dict[str, Change] = _INVALID_FILES | {
    "white space": lambda content: b" \n\n\t\n",
    "parquet's first bytes": lambda content: b"PAR1" + content,
    "another column name": lambda content: content.replace(b"sentence", b"sentense"),
    "the header alone": lambda content: content[: content.index(b"\n") + 1] if content[:1] != b"{" else b"",
}
_EQUIVALENT_TABLES: dict[str, Change] = _EQUIVALENT | {
    "blank lines": lambda content: content.replace(b"\n", b"\n\n"),
    "blank lines at the end": lambda content: content + b"\n\n\n",
}
# Texts that are legal in each format that can represent them.
_UNUSUAL_TEXTS = (
    "\u2028line separator", "next\x85line", "form\x0cfeed", "vertical\x0btab", "file\x1cseparator", "NA", "null",
    "None", "nan", "-1", "true", "  spaces around  ", 'say "hi" to', "it's", "'", '""', "=1+1", "#", "\\", "\\n", "a,b",
    "<b>&amp;",
    "[MASK]", "[CLS] [SEP]", "\U0001f600", "e\u0301 \u202e rtl", "\ufeff mark", "x" * 300_000, "\x1b[31mred", "\x07",
    "漢字", "\u00a0", "\ud7ff\ue000", "{", "a=b", "$(touch ran)", "`touch ran`", "%s %n {0}",
)  # fmt: skip


def _random_rows(rng: random.Random, count: int) -> Rows:
    """Returns up to `count` rows with different texts and alternating labels."""
    rows = [(sentence(rng, (BAD, GOOD)[number % 2]), str(number % 2)) for number in range(count)]
    return list(dict(rows).items())


def faulty_table(rng: random.Random, file_format: str, role: str) -> tuple[str, Table]:
    """Returns a table with a fault, or with an unusual but legal property, and the name of the fault or property.

    Args:
        rng: the random generator of the trial
        file_format: one of FORMATS
        role: one of TABLE_ROLES
    """
    rows = _random_rows(rng, rng.choice((3, 12, 40)))
    if role == "number":
        rows = [(text, f"{number / 7:.3f}") for number, (text, _) in enumerate(rows)]
    clean = encode_rows(rows, file_format)
    number = rng.randrange(len(rows))
    line = number + (1 if file_format == "jsonl" else 2)
    kind = rng.choices(("line", "label", "whole", "text", "shape"), (45, 10, 15, 20, 10))[0]
    if kind == "label" and role in ("dev", "number"):
        label = rng.choice(_INVALID_NUMBERS if role == "number" else _UNKNOWN_LABELS)
        rows[number] = (rows[number][0], label)
        return f"the label {label!r}", Table(rows, encode_rows(rows, file_format), line)
    if kind == "whole":
        name = rng.choice(list(_INVALID_TABLES))
        return name, Table(rows, _INVALID_TABLES[name](clean), 0)
    if kind == "text":
        text = rng.choice(_UNUSUAL_TEXTS)
        if file_format == "jsonl" and rng.random() < 0.5:
            text += "\nsecond line\r\tand a tab"
        elif file_format == "csv" and rng.random() < 0.5:
            text += "\nsecond line, and a comma"
        rows[number] = (text, rows[number][1])
        return f"the text {text[:40]!r}", Table(rows, encode_rows(rows, file_format), None)
    if kind == "shape":
        name = rng.choice(list(_EQUIVALENT_TABLES))
        return name, Table(rows, _EQUIVALENT_TABLES[name](clean), None)
    legal = _LEGAL_IN_CORPORA if role == "corpus" else ()
    name = rng.choice(
        [name for name, (formats, _) in _INVALID_LINES.items() if file_format in formats and name not in legal]
    )
    lines = clean.split(b"\n")
    lines[line - 1] = _INVALID_LINES[name][1](lines[line - 1])
    content = b"\n".join(lines)
    if rng.random() < 0.3:  # the number of the faulty line stays the same
        name, content = f"{name}, with CRLF", content.replace(b"\r", b"\n" if "return" in name else b"")
        lines = content.split(b"\n")
        content = b"\r\n".join(lines)
    if rng.random() < 0.2:
        name, content = f"{name}, with a mark", b"\xef\xbb\xbf" + content
    return name, Table(rows, content, line)


@kind("tables", trials=240)
def tables(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Runs a command that reads a table with one fault, or a legal table that looks wrong."""
    rng = trial_rng("tables", seed)
    file_format, role = FORMATS[seed % 3], TABLE_ROLES[seed // 3 % len(TABLE_ROLES)]
    name, table = faulty_table(rng, file_format, role)
    copy(stage, workdir, "done/tuned", "done/pre")
    folder = workdir / "table"
    folder.mkdir()
    split = "train" if role == "train" else "dev"
    file = folder / f"{split}.{file_format}"
    file.write_bytes(table.content)
    other = _random_rows(trial_rng("other", 0), 40)
    if role == "number":
        other = [(text, "0.5") for text, _ in other]
        other[0] = (other[0][0], "1.5")
    if role not in ("predict", "corpus"):
        (folder / f"{'dev' if split == 'train' else 'train'}.jsonl").write_bytes(encode_rows(other, "jsonl"))
    table_rows = with_overrides(ROWS, "task.path=table")
    arguments = {
        "predict": ["predict", "checkpoint=done/tuned", *HERE, f"input=table/dev.{file_format}", "output=out.jsonl"],
        "dev": ["evaluate", "checkpoint=done/tuned", "task.path=table", *HERE, "output=out.jsonl"],
        "train": ["finetune", *table_rows, "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "number": ["finetune", *with_overrides(table_rows, "task=custom"), "task.kind=regression",
                   "task.text=[sentence]", "task.label=label", "checkpoint=done/pre", "max_steps=1", "run_dir=run"],
        "corpus": [*with_overrides(VOCABULARY, f"data={_source_name(file_format)}", f"data.path=table/{file.name}"),
                   "data.text=sentence"],
    }[role]  # fmt: skip
    shape = f"{role}, {file_format}, line {table.line}: {name}"
    with fault_prefix(shape):
        answer = run_lmtool(workdir, *arguments, clean=True)
        # An error about two different lines names the second line first.
        where = [f"{file.name}:{table.line}", f"than line {table.line}"] if table.line else [file.name, "sentence"]
        if table.line is None:
            require_success(answer, "a legal table is refused: ")
            _compare_rows(workdir, role, table)
            return Verdict(Outcome.DONE, shape)
        require_refusal(answer, *where)
    return refused_or_done(answer, shape)


def _source_name(file_format: str) -> str:
    """Returns the name of the data source that reads files of a format."""
    return "jsonl" if file_format == "jsonl" else "csv"


def _compare_rows(workdir: Path, role: str, table: Table) -> None:
    """Raises TrialFailed if the rows that the command read differ from the rows of the table."""
    if role == "corpus":
        (file,) = (workdir / "table").glob("dev.*")
        entry = lookup("data", _source_name(file.suffix[1:]))
        source = build(entry.config(path=str(file), text="sentence")).complete()
        _require_texts(list(documents(source.parts("validation"))), [text for text, _ in table.rows if text.strip()])
        return
    labels = [_CLASS_NAMES.get(label, label) for _, label in table.rows]
    if role == "train":
        counts = json.loads((workdir / "run" / "facts.json").read_text())["data"]["labels"]
        if counts != {name: labels.count(name) for name in _CLASS_NAMES.values()}:
            raise TrialFailed(Outcome.SILENT, f"labels {counts}")
        return
    path = workdir / ("run/predictions.jsonl" if role == "number" else "out.jsonl")
    read = [json.loads(line) for line in path.read_text().split("\n") if line]
    _require_texts([row["sentence"] for row in read], [text for text, _ in table.rows])
    gold = [row.get("gold") for row in read]
    if role == "dev" and gold != labels:
        raise TrialFailed(Outcome.SILENT, f"gold labels {gold[:8]}")
    if role == "number" and gold != [float(label) for _, label in table.rows]:
        raise TrialFailed(Outcome.SILENT, f"gold values {gold[:8]}")


def _require_texts(read: list[str], expected: list[str]) -> None:
    """Raises TrialFailed, with the first difference, if the texts that were read are not the expected texts."""
    if read != expected:
        different = next((pair for pair in zip(expected, read, strict=False) if pair[0] != pair[1]), "none")
        detail = f"{len(read)} texts for {len(expected)}; the first difference: {str(different)[:200]}"
        raise TrialFailed(Outcome.SILENT, detail)


# --- texts ------------------------------------------------------------------------------------------------------------

TEXT_ROLES = ("data.path", "data.validation", "folder", "input", "tokenizer", "inspect")
_EQUIVALENT_TEXTS = _EQUIVALENT | {"blank lines around": lambda content: b"\n\n\n" + content + b"\n\n \n"}
_UNUSUAL_CHARACTERS = (
    "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\x1b[31m", "\x07", "\u202e", "\u200b",
    "\ufeff", "e\u0301\u0302\u0303", "\U0001f469\u200d\U0001f4bb", "[MASK] [CLS] [SEP] [PAD]",
    "<|endoftext|> </s> <pad>", "\t" * 50,
    "x" * 400_000, "a " * 100_000, "\u3000", "\ud7ff", "\U0010ffff", "=1+1", "../../..", "%s{0}$(touch ran)",
)  # fmt: skip
"""Characters that are legal in any text and do not end a line."""


@kind("texts", trials=120)
def texts(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Runs a command that reads plain text with one fault, or legal text that looks wrong."""
    rng = trial_rng("texts", seed)
    role = TEXT_ROLES[seed % len(TEXT_ROLES)]
    copy(stage, workdir, "done/tuned", "text.txt")
    if role == "input":
        return _predict_lines(workdir, rng)
    clean = (workdir / "text.txt").read_bytes()
    kind = rng.choices(("byte", "whole", "same", "odd"), (40, 20, 20, 20))[0]
    where, same = None, False
    if kind == "byte":
        name = rng.choice(list(_INVALID_BYTES))
        lines = clean.split(b"\n")
        number = rng.choice([number for number, line in enumerate(lines) if line])
        at = rng.randrange(len(lines[number]))
        lines[number] = lines[number][:at] + _INVALID_BYTES[name] + lines[number][at:]
        end = rng.choice((b"\n", b"\r\n", b"\r"))
        content, where = end.join(lines), f"odd.txt:{number + 1}:{at + 1}:"
        name += f" at {number + 1}:{at + 1}, lines end in {end!r}"
    elif kind == "whole":
        name = rng.choice(list(_INVALID_FILES))
        content = _INVALID_FILES[name](clean)
        # An empty file in a folder is legal.
        where = None if role == "folder" and not content.strip() else "odd.txt"
    elif kind == "same":
        name, same = rng.choice(list(_EQUIVALENT_TEXTS)), True
        content = _EQUIVALENT_TEXTS[name](clean)
    else:
        characters = rng.choice(_UNUSUAL_CHARACTERS)
        name = f"{characters[:20]!r}"
        at = rng.randrange(len(clean))
        content = clean[:at] + characters.encode() + clean[at:]
    return _train_on(workdir, role, name, content, where, same)


def _train_on(workdir: Path, role: str, name: str, content: bytes, where: str | None, same: bool) -> Verdict:
    """Runs a command that reads a content as text. workdir: the trial's working folder. role: one of TEXT_ROLES. name:
    the name of the fault. content: the content of the file. where: text that the error must contain; None if the
    content is legal. same: whether the content is another encoding of text.txt, so that the examples must be the
    same."""
    folder = workdir / "texts"
    folder.mkdir()
    (folder / "odd.txt").write_bytes(content)
    path = "texts/odd.txt"
    if role == "folder":
        write_text(folder / "plain.txt")
        path = "texts"
    arguments = ["pretrain", *TEXT, "max_steps=1", "run_dir=run", f"data.path={path}"]
    if role == "data.validation":
        arguments = [*arguments[:-1], "data.path=text.txt", f"data.validation={path}"]
    elif role == "tokenizer":
        arguments = [*with_overrides(VOCABULARY, f"data.path={path}")]
    elif role == "inspect":
        arguments = ["inspect", "pretrain", *TEXT, f"data.path={path}", "n=20", "tokens=5000", "output=seen.jsonl"]
    arguments = last_overrides(arguments)
    with fault_prefix(f"{role}: {name}"):
        answer = run_lmtool(workdir, *arguments, clean=True)
        if where is not None:
            require_refusal(answer, where)
        # `lmtool inspect` exits with status 3 if an unusual text changes the fractions of tokens that it measures.
        elif not (role == "inspect" and answer.status == 3):
            require_success(answer, "a legal text is refused: ")
        if same and role == "inspect":
            _compare_examples(workdir, arguments)
    return refused_or_done(answer, f"{role}: {name}")


def _compare_examples(workdir: Path, arguments: list[str]) -> None:
    """Raises TrialFailed if `lmtool inspect` shows other examples for the clean text."""
    examples = (workdir / "seen.jsonl").read_bytes()
    run_lmtool(workdir, *(word.replace("texts/odd.txt", "text.txt") for word in arguments))
    if (workdir / "seen.jsonl").read_bytes() != examples:
        raise TrialFailed(Outcome.SILENT, "the examples differ from those of the clean text")


def _predict_lines(workdir: Path, rng: random.Random) -> Verdict:
    """Runs `lmtool predict input=`, which reads each line as one row, on lines with a fault or with unusual
    characters."""
    lines = [f"the lovely cat saw the {number}" for number in range(6)]
    number = rng.randrange(6)
    end = rng.choice((b"\n", b"\r\n", b"\r"))
    mark = rng.choice((b"", b"\xef\xbb\xbf"))
    stdin = rng.random() < 0.3
    file = "-" if stdin else "lines.txt"
    if rng.random() < 0.4:
        name = rng.choice(list(_INVALID_BYTES))
        raw = [line.encode() for line in lines]
        raw[number] = raw[number][:4] + _INVALID_BYTES[name] + raw[number][4:]
        where: str | None = f"{'standard input' if stdin else file}:{number + 1}"
    else:
        characters = rng.choice(_UNUSUAL_CHARACTERS)
        name, where = f"{characters[:20]!r}", None
        lines[number] = lines[number][:4] + characters + lines[number][4:]
        raw = [line.encode() for line in lines]
    content = mark + end.join(raw) + end
    (workdir / "lines.txt").write_bytes(content)
    shape = f"input={file}: {name} on line {number + 1}, lines end in {end!r}"
    arguments = ["predict", "checkpoint=done/tuned", *HERE, f"input={file}"]
    with fault_prefix(shape):
        run_lmtool(workdir, *arguments, stdin=content)  # printed text must not contain control characters
        answer = run_lmtool(workdir, *arguments, "output=out.jsonl", stdin=content)
        if where is not None:
            require_refusal(answer, where, where.replace("standard input", "-"))
            return refused_or_done(answer, shape)
        require_success(answer, "a legal text is refused: ")
        predictions = (workdir / "out.jsonl").read_text().split("\n")
        _require_texts([json.loads(line)["sentence"] for line in predictions if line], lines)
    return Verdict(Outcome.DONE, shape)
