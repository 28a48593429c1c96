"""Data of strangers: file, column and label names that a terminal would obey, folders without end, addresses and names
that climb out of their place."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from trials.scenes import ESCAPES, EVALUATE, FINETUNE, PREDICT, PRETRAIN, Expected, Scene, replaced

EITHER, LEGAL = Expected.EITHER, Expected.LEGAL
Plant = Callable[[Path, random.Random], None]


def _nothing(place: Path, chance: random.Random) -> None:
    """What is typed is all."""


def _named(name: str, folder: str = "texts") -> Plant:
    def plant(place: Path, chance: random.Random) -> None:
        (place / folder).mkdir(exist_ok=True)
        (place / folder / name).write_text((place / "text.txt").read_text())

    return plant


def _table(header: str, *rows: str, name: str = "train.tsv") -> Plant:
    def plant(place: Path, chance: random.Random) -> None:
        (place / "rows" / name).write_text("\n".join([header, *rows, ""]))

    return plant


def _deep(place: Path, chance: random.Random) -> None:
    folder = place / "texts" / "/".join(["d"] * 500)
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text((place / "text.txt").read_text())


def _looped(place: Path, chance: random.Random) -> None:
    _named("a.txt")(place, chance)
    (place / "texts" / "again").symlink_to(".")


def _latest(content: str) -> Plant:
    def plant(place: Path, chance: random.Random) -> None:
        latest = place / "runs" / "latest"
        latest.unlink(missing_ok=True)  # a link to the newest run
        latest.write_text(content)

    return plant


def _pointer(content: str) -> Plant:
    def plant(place: Path, chance: random.Random) -> None:
        (place / "done" / "tuned" / "checkpoints" / "best").write_text(content)

    return plant


_FILES = {
    "terminal codes": f"{ESCAPES}.txt",
    "a line feed": "a\nerror: b.txt",
    "no UTF-8": "a\udcff.txt",
    "a dash in front": "-rf.txt",
    "a star": "*.txt",
    "spaces": " a b .txt",
    "only dots": "....txt",
}
_TEXTS = replaced(PRETRAIN, "data.path=texts")
SCENES = [
    Scene(f"a text file named with {name}", _TEXTS, _named(file), expected=LEGAL) for name, file in _FILES.items()
]
SCENES += [
    Scene(f"an error in a text file named with {name}", _TEXTS,
          lambda place, chance, file=file: (_named(file)(place, chance),
                                            (place / "texts" / file).write_bytes(b"a\0b"))[0], ("NUL",))
    for name, file in _FILES.items()
]  # fmt: skip
_ESCAPED = ESCAPES.replace("\t", "")
_GOOD = [f"a good text {number}\t{number % 2}" for number in range(20)]
SCENES += [
    Scene("a folder that links to itself", _TEXTS, _looped, expected=LEGAL),
    Scene("a folder 500 levels deep", _TEXTS, _deep, expected=LEGAL),
    Scene("terminal codes in a column name", tuple(FINETUNE), _table(f"{_ESCAPED}\tlabel", *_GOOD), ("sentence",)),
    Scene("terminal codes in a label", tuple(EVALUATE), _table("sentence\tlabel", f"a\t{_ESCAPED}", name="dev.tsv"),
          ("dev.tsv:2",)),
    Scene("terminal codes in a text", (*EVALUATE, "output=out"), _table("sentence\tlabel", f"{_ESCAPED}\t1", "b\t0",
                                                                      name="dev.tsv"), expected=LEGAL),
    Scene("terminal codes in new labels",
          replaced(FINETUNE, "task=custom", "task.kind=classification", "task.text=[sentence]", "task.label=label"),
          _table("sentence\tlabel", *(f"text {n}\t{_ESCAPED}{n % 2}" for n in range(40))), expected=EITHER),
    Scene("inspect of terminal codes in labels",
          ("inspect", *replaced(FINETUNE, "task=custom", "task.kind=classification", "task.text=[sentence]",
                                "task.label=label", "run_dir=null"), "n=2", "tokens=1000"),
          lambda place, chance: (_table("sentence\tlabel", *(f"text {n}\t{_ESCAPED}{n % 2}" for n in range(40)))(
              place, chance), (place / "rows" / "dev.tsv").unlink())[0], expected=EITHER),
    Scene("terminal codes in a typed text", (*PREDICT[:-1], f"text={_ESCAPED}"), _nothing, expected=LEGAL),
    Scene("terminal codes in a key", (*PRETRAIN, f"{_ESCAPED}=1"), _nothing),
    Scene("terminal codes in a value", (*PRETRAIN, f"optimizer.lr={_ESCAPED}"), _nothing),
    Scene("terminal codes in a path", replaced(PRETRAIN, f"data.path='{_ESCAPED}'"), _nothing, ("data.path",)),
    Scene("terminal codes in a flag", (*PRETRAIN, f"--{_ESCAPED}"), _nothing),
    Scene("terminal codes as a command", (_ESCAPED,), _nothing),
    Scene("terminal codes in a checkpoint's name", replaced(PREDICT, f"checkpoint='{_ESCAPED}'"), _nothing,
          ("checkpoint",)),
    Scene("a file of another folder as dev", (*FINETUNE, "task.files={../../precious/file: dev}"), _nothing,
          expected=EITHER),
]  # fmt: skip
SCENES += [
    Scene(f"name={name!r}", replaced(PRETRAIN, "run_dir=null", f"name='{name}'"), _nothing, ("name",))
    for name in (
        "../precious", "..", ".", "/tmp/x", "a/b", "a\\b", ".hidden", "-rf", "latest", "x" * 101, "a\nb", "a b", "ä"
    )
]  # fmt: skip
SCENES += [
    Scene(f"checkpoint={address}", replaced(PREDICT, f"checkpoint='{address}'", "offline=true"), _nothing,
          ("checkpoint",))
    for address in (
        "hf://../x", "hf://a/..", "hf://a/../../b", "hf://org/name@../../x", "hf://org/name/more", "hf://-org/name",
        "hf://org/.name", "hf://org/name.git", "hf://org--x/name", "hf://org/name@", "hf://" + "x" * 300, "hf://",
        "hf://user:pass@org/name", "http://localhost:1/x", "file:///etc", "hf://org/na me", "hf://ORG%2f..%2fx",
        "s3://x/y",
    )
]  # fmt: skip
SCENES += [
    Scene(f"runs/latest holds {content[:30]!r}", replaced(PREDICT, "checkpoint=runs/latest"), _latest(content),
          ("latest", "checkpoint", "runs"))
    for content in ("../../precious", "..", "", "/etc", "nowhere", "\0", "x" * 100_000, ESCAPES)
]  # fmt: skip
SCENES += [
    Scene(f"best holds {content[:30]!r}", tuple(PREDICT), _pointer(content), ("best", "checkpoint"), expected=EITHER)
    for content in ("../../../precious", "..", "/etc", "step_99999999", "\0", "x" * 100_000, ESCAPES)
]  # fmt: skip
