"""Secrets in every place where a user may have put them appear in no file of lmtool and not on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import TINY, write_rows, write_text

QUOTED = "qu\"o\\te's-sécret"
PASSWORD = "hunter-two-two"
SECRETS = {
    "PLANTED_KEY": QUOTED,
    "SERVICE_AUTH": "auth-auth-auth",
    "SERVICE_BEARER": "bearer-bearer",
    "DATABASE_URL": f"postgres://bob:{PASSWORD}@db/x",
}
ADDRESS = f"https://bob:{PASSWORD}@host"
CONTROL = "\x1b[31mred\r"


@pytest.fixture
def folder_with_secrets(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Path]:
    """A working folder with secrets in its paths and data; afterwards, checks that no output contains them."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for folder in (Path(ADDRESS), Path(QUOTED)):
        folder.mkdir(parents=True)
        write_text(folder / "text.txt")
        write_rows(folder / "rows")
        with (folder / "rows" / "dev.tsv").open("a") as file:
            file.writelines(f"The cat {secret} saw the dog.\t1\n" for secret in SECRETS.values())
    inputs = {path for path in place.rglob("*") if path.is_file()}
    yield place
    captured = capsys.readouterr()
    written = [path for path in place.rglob("*") if path.is_file() and path not in inputs]
    assert written
    for name, content in [("out", captured.out.encode()), ("err", captured.err.encode())] + [
        (str(path), path.read_bytes()) for path in written
    ]:
        for secret in [QUOTED, PASSWORD, SECRETS["SERVICE_AUTH"], SECRETS["SERVICE_BEARER"]]:
            for spelled in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1],
                            repr(secret)[1:-1], quote(secret), secret.replace("'", "''")):  # fmt: skip
                assert spelled.encode() not in content, name
    assert "\x1b" not in captured.out + captured.err and "\r" not in captured.out + captured.err


WORDS = [*TINY, "log_every=1", "max_steps=2", "cache_dir=cache"]


def quoted(text: str) -> str:
    """A value, quoted for an override."""
    return '"' + text.replace('"', '\\"') + '"'


@pytest.mark.usefixtures("reports", "figures")
def test_commands_write_and_print_no_secret(folder_with_secrets: Path) -> None:
    learn = ["pretrain", "model=bert_tiny", *WORDS, "data=text", f"data.path={quoted(ADDRESS + '/text.txt')}"]
    learn += ["batch_tokens=256"]
    assert cli.main([*learn, "name=a"]) == 0
    assert (
        cli.main([*learn, "name=a", f"data.validation={quoted(QUOTED + '/text.txt')}"]) == 2
    )  # the message names both values
    assert cli.main(["resume", "runs/a"]) == 0
    rows = f"task.path={quoted(QUOTED + '/rows')}"
    task = ["finetune", "task=sst2", rows, "checkpoint=runs/a", *WORDS[len(TINY) :], "max_length=32", "device=cpu"]
    task += ["precision=fp32", "batch_examples=16"]
    assert cli.main([*task, "name=b"]) == 0
    assert cli.main(["inspect", *task, "n=100", "tokens=500", "output=seen.jsonl"]) == 0
    assert cli.main(["evaluate", "checkpoint=runs/b", "output=evaluated.jsonl", rows]) == 0
    asked = f"The cat {' '.join(SECRETS.values())} saw."
    assert cli.main(["predict", "checkpoint=runs/b", f"text={asked}", "output=predicted.jsonl"]) == 0
    assert cli.main(["predict", "checkpoint=runs/b", f"text={asked}{CONTROL}"]) == 0
    assert cli.main(["predict", "checkpoint=runs/a", f"text={asked} [MASK]"]) == 0
    assert cli.main(["report", "runs/a", "runs/b"]) == 0
    Path("runs/b").rename(Path(ADDRESS) / "b")
    assert cli.main(["export", f"checkpoint={quoted(str(Path(ADDRESS) / 'b'))}", "output=exported"]) == 0
    Path("exported").rename(Path(QUOTED) / "exported")
    assert cli.main(["import", f"checkpoint={quoted(QUOTED + '/exported')}", "output=imported"]) == 0
    for path in (Path(QUOTED) / "exported/README.md", "imported/config.json", "predicted.jsonl", "evaluated.jsonl"):
        assert Path(path).is_file()


def test_sweep_writes_and_prints_no_secret(folder_with_secrets: Path) -> None:
    words = ["pretrain", "-m", "model=bert_tiny", *WORDS[:-2], "max_steps=1", "data=text", "batch_tokens=256"]
    words += ["cache_dir=cache"]
    path = f"data.path={quoted(QUOTED + '/text.txt')},{quoted(ADDRESS + '/nowhere.txt')}"
    assert cli.main([*words, path, "name=a"]) == 2
    (first,), (second,) = (list(Path("runs/a").glob(f"{number}_*/job.json")) for number in (0, 1))
    assert json.loads(first.read_text())["exit_status"] == 0
    assert "***" in first.read_text() and "***" in second.read_text()
    assert PASSWORD not in str(second) and QUOTED not in str(first)


@pytest.mark.parametrize("secret", [ADDRESS, QUOTED, SECRETS["SERVICE_AUTH"]])
def test_errors_contain_no_secret(folder_with_secrets: Path, secret: str) -> None:
    (folder_with_secrets / "written").write_text("")
    for words in (
        ["pretrain", f"seed={secret}"], ["pretrain", f"data.path={secret}"], ["pretrain", f"modle={secret}"],
        ["pretrain", secret], [secret], ["finetune", f"checkpoint={secret}", "task=sst2"], ["--debug", "list", secret],
        ["pretrain", "--config", secret], ["pretrain", "--config-dir", f"{secret}/no"],
        ["pretrain", "--plugin", f"{secret}.no"],
        ["predict", f"checkpoint={secret}", "text=a"], ["report", secret], ["resume", secret], ["show", secret],
        ["pretrain", "seed=" + "x" * 70 + secret], ["pretrain", f"model={secret}"],
    ):  # fmt: skip
        more = ["max_steps=no"] if words[0] == "pretrain" else []  # prevents training if the secret is accepted
        assert cli.main([*words, *more]) == 2, words


def test_control_characters_are_escaped(folder_with_secrets: Path) -> None:
    (folder_with_secrets / "written").write_text("")
    folder = Path(f"rows{CONTROL}")
    folder.mkdir()
    lines = [
        f"sentence\tla{CONTROL.strip()}bel",
        *(f"The cat saw it.\t{CONTROL.strip()}{number % 2}" for number in range(9)),
    ]
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    (folder / "dev.jsonl").write_text(json.dumps({"sentence": "a", f"x{CONTROL}": 1}) + "\n")
    for words in (
        ["pretrain", "data=text", f'data.path="{folder}/nowhere.txt"'],
        ["pretrain", f"se{CONTROL}ed=1"], ["pretrain", f"seed={CONTROL}"], [CONTROL],
        ["finetune", "task=custom", "task.kind=classification", f'task.path="{folder}"', "task.text=[sentence]",
         "task.label=nope", "model=bert_tiny", "checkpoint=none", *WORDS[:-1], "batch_examples=4"],
    ):  # fmt: skip
        assert cli.main(words) == 2, words
    (folder / "dev.jsonl").unlink()
    label = lines[0].partition("\t")[2]
    words = ["inspect", "finetune", "task=custom", "task.kind=classification", f'task.path="{folder}"', *WORDS[:-1]]
    words += ["task.text=[sentence]", f'task.label="{label}"', "model=bert_tiny", "checkpoint=none", "n=2", "tokens=99"]
    assert cli.main([*words, "batch_examples=4"]) in (0, 3, 2)
