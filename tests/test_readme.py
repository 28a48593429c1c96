"""The commands of the README run, in its order, each in the folder a reader would be in: with small text and small
budgets, but the words as they stand."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmtool import cli
from lmtool.data.pydocs import pydocs_rows
from tests.commands.conftest import but_for, skip_reports, write_rows, write_text

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
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


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {words[1] for words in commands() if words[0] == "make"} | set(re.findall(r"`make (\w+)`", README))
    assert named and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    skip_reports(monkeypatch)
    few = partial(pydocs_rows, per_class_train=8, per_class_validation=6)
    monkeypatch.setattr("lmtool.tasks.loading.pydocs_rows", few)
    monkeypatch.setattr("lmtool.data.pydocs._MODULES", (25, 30))
    Path("my_texts").mkdir()
    write_text(tmp_path / "my_texts" / "one.txt")
    Path("wikitext").mkdir()
    write_text(tmp_path / "wikitext" / "test.txt")
    Path("glue").mkdir()
    write_rows(tmp_path / "glue" / "sst2")
    rows = [
        "review,stars",
        *(f"text number {number} is here,{'good' if number % 2 else 'bad'}" for number in range(40)),
    ]
    Path("reviews.csv").write_text("\n".join(rows) + "\n")
    articles = [f"{number};The cat number {number} is here. It sat down." for number in range(60)]
    Path("articles.csv").write_text("\n".join(["id;body", *articles]) + "\n")
    Path("crawl").mkdir()
    lines = [json.dumps({"title": "A cat", "body": text}) for text in articles]
    Path("crawl", "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    Path("prompts.txt").write_text("Return the\nA list of\n")
    Path("tatoeba").mkdir()
    for split in ("train", "dev"):
        pairs = [f"The cat is {word}.\tDie Katze ist {word}." for word in ("old", "new", "red", "big") * 6]
        Path("tatoeba", f"{split}.tsv").write_text("\n".join(pairs) + "\n")
    Path("my_plugin.py").write_text(next(block for block in blocks("python") if "TuningConfig" in block))

    ran = 0
    for words in commands():
        if words[0] != "lmtool":
            continue
        verb = next((word for word in words[1:] if not word.startswith("-")), "")
        more = list(SMALL.get(verb, [])) if "--cfg" not in words and verb in SMALL else []
        if any(
            word.startswith(("data=text", "data=task", "data=jsonl", "data=my_", "data=articles", "data=mixture"))
            or word == "--config"
            for word in words
        ):
            more = [word for word in more if not word.startswith("data.")]
        if "--config" in words:
            more = []
        if any(word.startswith("data=pydocs") for word in more):
            more = []
        if any(word.startswith("branch=") for word in words):  # its trunk has two steps here
            words, more = [re.sub("^(branch=.*@).*", r"\g<1>2", word) for word in words], ["max_steps=3"]
        if words[1:3] == ["inspect", "tokenizer"]:
            more = ["kinds=[word]"]
        if "-m" in words:
            more += ["seed=1,2"]
        status = cli.main(but_for(words[1:], [*more, *_cache(verb, words)]))
        assert status == 0, shlex.join(words)
        ran += 1
    assert ran >= 15
    given: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "lmtool.load" in block), given)
    assert given["logits"].shape[0] == len(given["vectors"]) == len(given["labels"]) == 2
    plugin = ["finetune", "--plugin", "my_plugin", "tuning=biases", "task=sst2", "task.path=glue/sst2"]
    assert cli.main([*plugin, "checkpoint=runs/first", "max_steps=2", "cache_dir=cache"]) == 0


def _cache(verb: str, words: list[str]) -> list[str]:
    """The user's own cache folder is left alone."""
    looks = words[1] == "inspect" and words[2] in ("attention", "positions", "word")  # these cache nothing
    cached = verb in CACHED and not looks and "--config" not in words and "--help" not in words
    return ["cache_dir=cache"] if cached else []
