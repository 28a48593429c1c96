"""The commands of README.md and of pages in docs run unchanged and in order, in the folder of a reader, except for
small texts and budgets. The output in README.md is compared with the actual output, except for numbers."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.config import registry
from lmtool.data.pydocs import pydocs_rows
from tests.commands.conftest import coarsen, merge_overrides, pretrain, skip_reports, write_rows, write_text

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "pretrain": [
        "max_steps=2", "max_minutes=null", "batch_tokens=512", "data.packages=[json,logging,email]",
        "data.validation_fraction=0.2", "evaluate_every=2",
    ],
    "finetune": ["max_steps=2", "evaluate_every=2"],
    "probe": ["examples=50", "held_out=50", "classes=10"],
}  # fmt: skip
CACHED = {
    "pretrain", "finetune", "evaluate", "predict", "generate", "embed", "probe", "plan", "tokenizer", "check", "doctor",
    "import", "profile", "inspect",
}  # fmt: skip
# Commands that the tests cannot run, with the reason or the test that covers them.
NOT_RUN = {
    "pip install": "installs",
    "make ": "test_make_targets_exist",
    ".venv/bin/python scripts/": "minutes; test_links_and_scripts_exist",
    "python scripts/": "minutes; test_links_and_scripts_exist",
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```(?:{language})\n(.*?)```", text_of(page), re.DOTALL)


@dataclass
class Command:
    """A command of a page, and the output lines that the page shows, if any."""

    words: list[str]
    printed: list[str] = field(default_factory=list)


def commands(page: str) -> list[Command]:
    """The commands of the blocks bash and console, in order, without redirections of their output."""
    found: list[Command] = []
    for language, block in re.findall(r"```(bash|console)\n(.*?)```", text_of(page), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "bash" and line.strip():
                found.append(Command(shlex.split(line.partition(" > ")[0], comments=True)))
            elif line.startswith("$ "):
                found.append(Command(shlex.split(line[2:])))
            elif language == "console":
                found[-1].printed.append(line.rstrip())
    return [command for command in found if command.words]


def test_make_targets_exist() -> None:
    makefile = text_of("Makefile")
    pages = [text_of(page) for page in ("README.md", "docs/recipes.md", "docs/speed.md")]
    named = set(re.findall(r"(?:`|^)make (\w+)", "\n".join(pages), re.MULTILINE))
    assert named and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_links_and_scripts_exist() -> None:
    for page in ("README.md", "docs/recipes.md", "docs/speed.md"):
        text = text_of(page)
        for script in re.findall(r"\bscripts/\w+\.(?:py|sh)", text):
            assert (ROOT / script).is_file(), script
        for target in re.findall(r'(?:\]\(|src(?:set)?=")([^)"]+)', text):
            file, _, anchor = target.partition("#")
            where = (ROOT / page).parent / file if file else ROOT / page
            if target.startswith("http"):
                continue
            assert where.exists(), target
            heads = re.findall(r"^#+ (.*)$", where.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def fill(folder: Path) -> None:
    """Write the texts and tables that the pages name."""
    for name in ("my_texts", "wikitext", "glue", "crawl", "tatoeba"):
        (folder / name).mkdir()
    write_text(folder / "my_texts" / "one.txt")
    write_text(folder / "wikitext" / "test.txt")
    write_rows(folder / "glue" / "sst2")
    rows = [f"text number {number} is here,{'good' if number % 2 else 'bad'}" for number in range(40)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars", *rows]) + "\n")
    rows = [f"When does card {number} come?,{'card' if number % 2 else 'cash'}" for number in (*range(60), 4, 5)]
    (folder / "questions.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    articles = [f"{number};The cat number {number} is here. It sat down." for number in range(60)]
    (folder / "articles.csv").write_text("\n".join(["id;body", *articles]) + "\n")
    lines = [json.dumps({"title": "A cat", "body": text}) for text in articles]
    (folder / "crawl" / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    pair = {"sentence_good": "The cats are here.", "sentence_bad": "The cats is here."}
    (folder / "blimp").mkdir()
    (folder / "blimp" / "agreement.jsonl").write_text(json.dumps(pair) + "\n")
    (folder / "pairs.csv").write_text("good,bad\nThe cats are here.,The cats is here.\n")
    (folder / "prompts.txt").write_text("Return the\nA list of\n")
    for split in ("train", "dev"):
        pairs = [f"The cat is {word}.\tDie Katze ist {word}." for word in ("old", "new", "red", "big") * 6]
        (folder / "tatoeba" / f"{split}.tsv").write_text("\n".join(pairs) + "\n")
    (folder / "my_plugin.py").write_text(next(block for block in blocks("README.md", "python") if "Tuning" in block))
    files = re.findall(r"```python file=(\w+\.py)\n(.*?)```", text_of("docs/extend.md"), re.DOTALL)
    for name, code in files:
        (folder / name).write_text(code)


def fill_hub(hub: Path, repository: str) -> None:
    """Write a tiny checkpoint into the cache of the hub, instead of the one that a page downloads."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    if not folder.exists():
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots").mkdir()
        run = pretrain("published", "data.path=my_texts", "max_steps=1")
        assert cli.main(["export", str(run), f"output={folder / 'snapshots' / ('0' * 40)}"]) == 0
        shutil.rmtree(run)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")  # xdist sets 80
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    skip_reports(monkeypatch)
    coarsen(monkeypatch)
    few = partial(pydocs_rows, per_class_train=8, per_class_validation=6)
    monkeypatch.setattr("lmtool.tasks.loading.pydocs_rows", few)
    monkeypatch.setattr("lmtool.data.pydocs._MODULES", (25, 30))
    fill(tmp_path)
    yield tmp_path
    for plugin in (path.stem for path in tmp_path.glob("*.py")):  # or hints in other tests would name it
        sys.modules.pop(plugin, None)
        for table in registry._TABLES.values():
            for name in [name for name, entry in table.items() if entry.config.__module__ == plugin]:
                del table[name]


def smaller(words: list[str], printed: bool) -> list[str]:
    """The words with small budgets and a local cache. printed: whether the output is compared."""
    verb = next((word for word in words[1:] if not word.startswith("-")), "")
    more = list(SMALL.get(verb, [])) if "--cfg" not in words and "--config" not in words else []
    if any(re.match("data=(?!pydocs)|--config$", word) for word in words):
        more = [word for word in more if not word.startswith("data.")]
    if any(word.startswith("branch=") for word in words):  # the trunk has two steps
        words, more = [re.sub("^(branch=.*@).*", r"\g<1>2", word) for word in words], ["max_steps=3"]
    if words[1:3] == ["inspect", "tokenizer"]:
        more = ["vocab_size=500", "data.packages=[json,logging,email]", *([] if printed else ["kinds=[word]"])]
    if verb == "inspect" and printed and "=" in words[2]:
        more = ["tokens=20000", "data.packages=[json,logging,email]"]
    if "-m" in words:
        more += ["seed=1,2"] if printed else ["seed=1"]
    if any("hf://" in word for word in words):
        more += ["offline=true"]
    looks = words[1] == "inspect" and words[2] in ("attention", "positions", "word")  # commands without a cache
    if verb in CACHED and not looks and not {"--config", "--help"} & set(words):
        more += ["cache_dir=cache"]
    return merge_overrides(words[1:], more)


def run_page(page: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Run the commands of a page; return the number of compared outputs."""
    compared, failed = 0, []
    for command in commands(page):
        line = shlex.join(command.words)
        if any(line.startswith(start) for start in NOT_RUN):
            continue
        assert command.words[0] == "lmtool", f"{page}: {line} is not a command of lmtool"
        if repository := re.search(r"hf://([\w/.-]+)", line):
            fill_hub(Path("hub"), repository[1])
        capsys.readouterr()
        status = cli.main(smaller(command.words, bool(command.printed)))
        screen = capsys.readouterr()
        out = re.sub(r"^\w[\w ]* …\n", "", screen.err + screen.out, flags=re.MULTILINE)  # without progress lines
        if status:
            failed.append(f"{line}\nexit status {status}")
        if command.printed:
            compared += 1
            if wrong := missing(command.printed, out.splitlines()):
                failed.append(f"{line}\n{wrong}\nprinted:\n{out}")
    assert not failed, "\n\n".join([page, *failed])
    return compared


def test_readme_commands_print_the_shown_output(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = sum(bool(command.printed) for command in commands("README.md"))
    assert run_page("README.md", capsys) == printed >= 9
    given: dict[str, Any] = {}
    exec(next(block for block in blocks("README.md", "python") if "lmtool.load" in block), given)
    assert given["logits"].shape[0] == len(given["vectors"]) == len(given["labels"]) == 2


@pytest.mark.slow
def test_commands_of_recipes_and_speed_pages_run(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page("docs/recipes.md", capsys)
    run_page("docs/speed.md", capsys)


# Patterns for differences between the output of a page and that of a two-step run, and their replacements: numbers with
# signs and units, comparisons, predictions.
KINDS = [
    (r"\b(better than|worse than|not clearly different from)\b", "BESIDE"),
    (r", by |\((?=[\d.]+, [\d.]+ standard errors\))", " ("),
    (r"standard errors\)?", "standard errors"),
    (r"^return the.* of the list\.  \(.*\)$", "FILLED"),
    (r"^\w+ [\d.]+  The ATM", "LABEL The ATM"),
    (r"^(Best minus|Not significantly|All others).*", "VERDICT"),
    (r"^ (wordpiece|bytebpe|bpe|sentencepiece|word|character) +\S.*", r" \1 PIECES"),
    (r"stopped: max_\w+ reached", "stopped: BUDGET"),
    (r", [^,]+ of it training", ""),
    (r"[-+~±]?\d[\d.,]*(e[-+]?\d+)?%?", "#"),
    (r"# pieces?\b", "# pieces"),
    (r"# (k|M|G|T|P|E|kB|MB|GB|TB|B|MFLOP|GFLOP|TFLOP|PFLOP|EFLOP|ms|s|min|h)\b", "#"),
    (r"#(:#)+", "#"),
    (r"#( #)+", "#"),
    (r"-{2,}", "--"),
    (r" +", " "),
]


def shape(line: str) -> str:
    for pattern, kind in KINDS:
        line = re.sub(pattern, kind, line)
    return line.strip()


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def shapes(lines: list[str]) -> list[str]:
    """Table headers and rules, the first cell of each table row, and other lines, all with KINDS replaced."""
    shaped, table = [], 0
    for line in lines:
        if re.fullmatch(r"-+(  +(-+|\.\.\.))+", line):
            table = len(cells(line))
        elif table and len(cells(line)) < 2 and not line.startswith((" ", "...")):
            table = 0
        elif table and line != "...":
            shaped.append(shape(cells(line)[0]))
            continue
        shaped.append(shape(line))
    return shaped


def missing(wanted: list[str], printed: list[str]) -> str | None:
    """The first line of wanted that was not printed at its position, None if all were.

    "..." matches any lines, or any rest at the end of a line; lines between two of them must be consecutive."""
    rows, place, anywhere = shapes(printed), 0, False
    for line, plain in zip(shapes(wanted), wanted, strict=True):
        if line == "...":
            anywhere = True
            continue
        fits = [
            n
            for n in range(place, len(rows))
            if rows[n] == line or (plain.endswith("...") and rows[n].startswith(line[:-3].strip()))
        ]
        if not fits or (fits[0] != place and not anywhere):
            return f"not printed there: {plain}\nwanted: {line}\nthere: {rows[place : place + 1]}"
        place, anywhere = fits[0] + 1, False
    return None if anywhere or place == len(rows) else f"printed after the last line: {printed[place:]}"


def test_missing_finds_lines_that_are_not_printed() -> None:
    printed = ["a  b", "--  --", "x  1", "done in 3 s", "score 0.1"]
    assert missing(["a  b", "---  ---", "x  20", "...", "score 0.7"], printed) is None
    for wrong in (
        ["..."] + ["scores 0.1"],
        ["a  b"],
        ["a  c", "..."],
        ["a  b", "score 0.1"],
        ["...", "done in s", "..."],
    ):
        assert missing(wrong, printed) is not None, wrong
