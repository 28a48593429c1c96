"""Small text, labeled rows and tiny models, with which whole commands run in a second or two."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import yaml

from lmtool.cli import main as cli
from lmtool.config.registry import lookup
from tests.figures import resample_less, skip_drawing
from tests.figures import skip_reports as skip_reports

CONF = Path(__file__).resolve().parents[2] / "conf"
NOUNS = ["cat", "dog", "bird", "house", "river", "tree", "stone", "child", "king", "queen", "ship", "road"]
GOOD = ["lovely", "bright", "kind", "happy", "warm", "gentle"]
BAD = ["awful", "dark", "cruel", "sad", "cold", "bitter"]

TINY = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.feedforward_size=64",
    "model.vocab_size=400", "max_length=32", "device=cpu", "precision=fp32",
]  # fmt: skip


KEEP = "keep_optimizer=all"
"""So that tests can remove the last checkpoint of a finished run, as if it had been killed before."""
FAMILY_SIZES = ["model.cell_size=16", "model.filters=[[1,4],[2,4]]", "model.highways=1"]


def tiny(model: str) -> list[str]:
    """TINY without sizes that the preset's family lacks, and with sizes of its own."""
    values = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())
    if "name" not in values:
        return tiny(next(name for name in values["defaults"] if name != "_self_"))
    family = lookup("model", values["name"])
    if family is None:  # auto: the checkpoint sets the sizes
        return [*TINY]
    fields = family.config.model_fields
    own = {name for name, field in fields.items() if field.default != 0}  # a family without layers allows only 0
    return [
        word for word in (*TINY, *FAMILY_SIZES) if not word.startswith("model.") or word[6:].partition("=")[0] in own
    ]


def sentence(chance: random.Random, adjectives: list[str]) -> str:
    subject, other = chance.sample(NOUNS, 2)
    first, second = chance.choice(adjectives), chance.choice(adjectives)
    return f"The {first} {subject} saw the {second} {other} near the {chance.choice(NOUNS)}."


def follow_card(folder: str) -> None:
    """Runs the Python example in the README.md of an exported folder."""
    code = (Path(folder) / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert len(code.split("\n\n")) == 2 and code.count("\n") == 4
    exec(code, {})


def coarsen(patch: pytest.MonkeyPatch) -> None:
    """The elements of figures are placed roughly, and intervals have fewer resamples: both take longer than scoring a
    tiny model. Layouts are tested in tests/reporting."""
    # Without an engine: a figure with the one named "none" is drawn twice.
    patch.setattr("lmtool.reporting.drawing._arrange", lambda figure: figure.set_layout_engine(None))
    resample_less(patch)


@pytest.fixture
def reports() -> None:
    """Runs write reports, for tests that read them."""


@pytest.fixture(autouse=True)
def reports_on_request(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no reports, except in tests that use the fixture `reports`."""
    if "reports" not in request.fixturenames:
        skip_reports(monkeypatch)


@pytest.fixture
def figures() -> None:
    """Figures are drawn, for tests that look at them."""


@pytest.fixture(autouse=True)
def coarse_figures_and_intervals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not drawn, except in tests that use the fixture `figures`."""
    coarsen(monkeypatch)
    if "figures" not in request.fixturenames:
        skip_drawing(monkeypatch)


def work_in_copy(folder: Path, place: Path, patch: pytest.MonkeyPatch) -> Path:
    """Copies a folder and makes the copy the working folder."""
    shutil.copytree(folder, place, symlinks=True, dirs_exist_ok=True)
    patch.chdir(place)
    return place


@contextmanager
def working_in(place: Path) -> Iterator[None]:
    """Makes `place` the working folder, with text.txt and the labeled folder rows/, for fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        skip_reports(patch)
        write_text(place / "text.txt")
        write_rows(place / "rows")
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with text.txt, and the labeled folder rows/."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    write_rows(tmp_path / "rows")
    return tmp_path


@cache
def text() -> str:
    chance = random.Random(0)
    paragraphs = [" ".join(sentence(chance, GOOD + BAD) for _ in range(6)) for _ in range(120)]
    return "\n\n".join(paragraphs) + "\n"


@cache
def tables() -> dict[str, str]:
    """The labeled rows of each split."""
    chance, lines = random.Random(1), {}
    for split, count in (("train", 96), ("dev", 40)):
        rows = [(sentence(chance, (BAD, GOOD)[number % 2]), number % 2) for number in range(count)]
        lines[split] = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
    return {split: "\n".join(each) + "\n" for split, each in lines.items()}


def write_text(path: Path) -> None:
    path.write_text(text())


def write_rows(folder: Path) -> None:
    folder.mkdir()
    for split, lines in tables().items():
        (folder / f"{split}.tsv").write_text(lines)


def merge_overrides(words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """All words, with only the last value of each key."""
    everything = [*words, *more]
    last = {word.partition("=")[0]: number for number, word in enumerate(everything) if "=" in word}
    return [word for number, word in enumerate(everything) if "=" not in word or last[word.partition("=")[0]] == number]


def pretrain(name: str, *more: str, model: str = "bert_tiny", status: int = 0) -> Path:
    """Run `lmtool pretrain` on the text, by default six steps with two evaluations, and return the run folder."""
    words = [
        "pretrain",
        f"model={model}",
        *tiny(model),
        "data=text",
        "data.path=text.txt",
        "cache_dir=cache",
        f"name={name}",
        KEEP,
    ]
    budget = [] if any(word.startswith("max_") for word in more) else ["max_steps=6", "evaluate_every=3"]
    assert (
        cli.main(merge_overrides([*words, f"name={name}", "batch_tokens=256", "log_every=1", *budget], more)) == status
    )
    return Path("runs") / name


def finetune(name: str, *more: str, status: int = 0) -> Path:
    """Run `lmtool finetune` on the rows and return the run folder."""
    words = ["finetune", "task=sst2", "task.path=rows", "cache_dir=cache", "batch_examples=16", "max_length=32", KEEP]
    assert cli.main(merge_overrides([*words, "device=cpu", "precision=fp32", f"name={name}"], more)) == status
    return Path("runs") / name
