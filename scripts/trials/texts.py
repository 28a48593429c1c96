"""Plain text with one fault planted at a known place, and text that only looks wrong: as training text, as held-out
text, and as the input of predict."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.commands.conftest import write_text
from trials.commands import files_in, nothing_left, refused, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.stage import HERE, TEXT, copy

ROLES = ("data.path", "data.validation", "folder", "input", "tokenizer", "inspect")
_BYTES = {
    "a NUL byte": b"\0",
    "a byte that is not UTF-8": b"\xff",
    "a cut UTF-8 sequence": b"\xe2\x82 ",
    "a surrogate in UTF-8": b"\xed\xa0\x80",
    "an overlong form": b"\xc0\xaf",
}
"""Refused at the line and byte where they stand."""
_WHOLE = {
    "nothing": lambda content: b"",
    "white space": lambda content: b" \n\t\r\n\x0c\n" * 50,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "UTF-32, big end first": lambda content: b"\x00\x00\xfe\xff" + content.decode().encode("utf-32-be"),
    "gzip's first bytes": lambda content: b"\x1f\x8b\x08\x00" + content,
    "a picture's first bytes": lambda content: b"\x89PNG\r\n" + content,
}
"""Refused by the name of the file."""
_SAME = {
    "a mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "CR": lambda content: content.replace(b"\n", b"\r"),
    "no last line end": lambda content: content.rstrip(b"\n"),
    "blank lines around": lambda content: b"\n\n\n" + content + b"\n\n \n",
}
"""The same text in other clothes: what comes out must be the same."""
_ODD = (
    "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\x1b[31m", "\x07", "\u202e", "\u200b",
    "\ufeff", "e\u0301\u0302\u0303", "\U0001f469\u200d\U0001f4bb", "[MASK] [CLS] [SEP] [PAD]",
    "<|endoftext|> </s> <pad>", "\t" * 50,
    "x" * 400_000, "a " * 100_000, "\u3000", "\ud7ff", "\U0010ffff", "=1+1", "../../..", "%s{0}$(touch ran)",
)  # fmt: skip
"""Legal in any text, and no end of a line."""


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("texts", seed)
    role = ROLES[seed % len(ROLES)]
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
        # An empty file among others is counted, and no fault.
        where = None if role == "folder" and not content.strip() else "odd.txt"
    elif kind == "same":
        name, same = chance.choice(list(_SAME)), True
        content = _SAME[name](clean)
    else:
        odd = chance.choice(_ODD)
        name = f"{odd[:20]!r}"
        at = chance.randrange(len(clean))
        content = clean[:at] + odd.encode() + clean[at:]
    return _corpus(place, role, name, content, where, same)


def _corpus(place: Path, role: str, name: str, content: bytes, where: str | None, same: bool) -> Verdict:
    """The content as a file that is trained on. where: what the error must name; same: whether it is the clean text."""
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
        words = ["tokenizer", "data=text", f"data.path={path}", "cache_dir=cache", "output=vocabulary",
                 "tokenizer=wordpiece", "tokenizer.vocab_size=300"]  # fmt: skip
    elif role == "inspect":
        words = ["inspect", "pretrain", *TEXT, f"data.path={path}", "n=20", "tokens=5000", "output=seen.jsonl"]
    words = [words[0], *{word.partition("=")[0]: word for word in words[1:]}.values()]
    before = files_in(place)
    with planted(f"{role}: {name}"):
        answer = typed(place, *words)
        if where is not None and not refused(answer, where):
            raise Failed(Outcome.SILENT, "read without a word")
        # inspect measures shares of tokens, which a strange text may well move: its status says so.
        if where is None and answer.status and not (role == "inspect" and answer.status == 3):
            raise Failed(Outcome.DEAD_END, f"a legal text is refused: {answer.errors[:300]}")
        nothing_left(place, before, answer)
        if same and role == "inspect":
            _compare(place, words)
    return Verdict(Outcome.REFUSED if where else Outcome.DONE, f"{role}: {name}: {answer.errors[:120]}")


def _compare(place: Path, words: list[str]) -> None:
    seen = (place / "seen.jsonl").read_bytes()
    typed(place, *(word.replace("texts/odd.txt", "text.txt") for word in words))
    if (place / "seen.jsonl").read_bytes() != seen:
        raise Failed(Outcome.SILENT, "the model is fed something else than from the clean text")


def _input(place: Path, chance: random.Random) -> Verdict:
    """`predict input=`: one row a line, whatever stands in it."""
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
        typed(place, *words, stdin=content)  # the screen holds no control characters
        answer = typed(place, *words, "output=out.jsonl", stdin=content)
        if where is not None:
            if not refused(answer, where, where.replace("standard input", "-")):
                raise Failed(Outcome.SILENT, "read without a word")
            return Verdict(Outcome.REFUSED, f"{shape}: {answer.errors[:120]}")
        if answer.status:
            raise Failed(Outcome.DEAD_END, f"a legal text is refused: {answer.errors[:300]}")
        rows = [json.loads(line)["sentence"] for line in (place / "out.jsonl").read_text().split("\n") if line]
        if rows != lines:
            raise Failed(Outcome.SILENT, f"{len(rows)} rows for {len(lines)} lines, or other texts")
    return Verdict(Outcome.DONE, shape)


KIND = Kind("texts", "text with one fault, or that only looks wrong", trials=120, draw=2, trial=_trial)
