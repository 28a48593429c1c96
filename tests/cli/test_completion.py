"""Shell completion of commands, flags, keys, choices, values, runs and files: without torch, and silent on errors."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtool.cli import completion as completing
from lmtool.cli import main as cli
from lmtool.cli.completion import SCRIPTS, candidates, format_for_shell
from tests.reporting.trackers import odd


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def working_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with two runs, a sweep's job and files; all tests share one completion table."""
    monkeypatch.setattr(completing, "CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    for run in ("runs/first", "runs/second", "runs/sweep/0"):
        Path(run).mkdir(parents=True)
        (Path(run) / "config.yaml").write_text("")
    Path("my texts").mkdir()
    Path("rows.tsv").write_text("")
    Path(".hidden").write_text("")
    yield tmp_path


def completions(line: str) -> set[str]:
    return set(candidates(f"lmtool {line}"))


@pytest.mark.parametrize(
    ("line", "expected", "absent"),
    [
        ("pre", {"pretrain ", "predict "}, {"finetune "}),
        ("", {"pretrain ", "completion "}, {"optimizer="}),
        ("pretrain model=be", {"model=bert ", "model=bert_tiny "}, {"model=gpt "}),
        ("pretrain op", {"optimizer=", "optimizer."}, {"optimizer.lr="}),
        ("pretrain optimizer.", {"optimizer.lr=", "optimizer.momentum="}, {"optimizer.name="}),
        ("pretrain optimizer=adamw optimizer.", {"optimizer.lr=", "optimizer.betas="}, {"optimizer.momentum="}),
        ("pretrain model=gpt_tiny model.", {"model.num_layers=", "model.positions="}, {"model.segments="}),
        ("pretrain model.positions=r", {"model.positions=rotary "}, {"model.positions=learned "}),
        ("pretrain model.positions=rotary model.positions.", {"model.positions.base="}, set()),
        ("pretrain experiment=bert_t", {"experiment=bert_tiny "}, set()),
        ("pretrain exp", {"experiment="}, {"experiment."}),
        ("pretrain seed=1 se", set(), {"seed="}),
        ("pretrain offline=", {"offline=true ", "offline=false "}, {"offline=null "}),
        ("pretrain precision=f", {"precision=fp32 ", "precision=fp16 "}, {"precision=bf16 "}),
        ("pretrain max_tokens=", {"max_tokens=null "}, set()),
        ("pretrain logger=[w", {"logger=[wandb"}, set()),
        ("pretrain logger=[wandb,", {"logger=[wandb,tensorboard"}, {"logger=[wandb,wandb"}),
        ("pretrain logger.w", {"logger.wandb."}, set()),
        ("pretrain logger.wandb.mode=", {"logger.wandb.mode=auto ", "logger.wandb.mode=offline "}, set()),
        ("pretrain distill.terms.h", {"distill.terms.hard."}, {"distill.terms.soft."}),
        ("finetune task=ss", {"task=sst2 "}, {"task=rte "}),
        ("finetune -m task=sst2,rt", {"task=sst2,rte "}, set()),
        ("finetune task=row", {"task=rows.tsv "}, set()),
        ("finetune task=sst2 task.", {"task.path="}, set()),
        ("finetune task=sst2 task.path=", {"task.path=rows.tsv ", "task.path=my texts/"}, {"task.path=.hidden "}),
        ("finetune checkpoint=r", {"checkpoint=runs/first ", "checkpoint=runs/sweep/0 ", "checkpoint=runs/"}, set()),
        ("finetune distill.teacher=runs/s", {"distill.teacher=runs/second "}, {"distill.teacher=runs/first "}),
        ("evaluate ", {"checkpoint=", "runs/first "}, set()),
        ("resume ", {"runs/first ", "runs/sweep/0 "}, {"rows.tsv "}),
        ("report runs/f", {"runs/first "}, {"runs/second "}),
        ("plan ", {"pretrain ", "finetune ", "model="}, set()),
        ("plan finetune tas", {"task="}, set()),
        ("plan pretrain me", {"measure="}, set()),
        ("profile pretrain st", {"steps="}, set()),
        ("list dis", {"distill ", "distill/term "}, set()),
        ("show optimizer.l", {"optimizer.lr "}, set()),
        ("show model=bert_t", {"model=bert_tiny "}, set()),
        ("completion ", {"bash ", "zsh ", "fish "}, set()),
        ("-", {"--multirun ", "--plugin "}, set()),
        ("pretrain --cfg ", {"job "}, set()),
        ("pretrain --config-dir m", {"my texts/"}, {"rows.tsv "}),
        ("pretrain --config r", {"rows.tsv ", "runs/"}, set()),
        ("pretrain data.path='my", {"data.path=my texts/"}, set()),
    ],
)  # fmt: skip
def test_completion_offers_matching_candidates(line: str, expected: set[str], absent: set[str]) -> None:
    words = completions(line)
    assert expected <= words and not absent & words
    assert words or not expected


@pytest.mark.parametrize(
    "line", ["zzz ", "pretrain zzz=", "pretrain model.zzz.", "pretrain zzz.", "list x=", "'", "\\"]
)
def test_unknown_words_have_no_candidates(line: str) -> None:
    assert not {word for word in completions(line) if "zzz" in word}


def test_completion_works_after_other_shell_commands() -> None:
    assert "pretrain " in candidates("cd lmtool && OMP_NUM_THREADS=2 /opt/bin/lmtool pre")


def test_config_dir_and_plugin_names_are_completed() -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/own.yaml").write_text("# @package _global_\nseed: 3\n")
    assert "experiment=own " in completions("pretrain --config-dir mine experiment=o")
    assert "logger=odd " in completions(f"pretrain --plugin {odd.__name__} logger=o")
    assert "logger.odd.how=" in completions(f"pretrain --plugin {odd.__name__} logger.odd.")


def test_table_is_cached_until_files_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table is rebuilt when its file is damaged, or when files of lmtool or of the user change."""
    built: list[int] = []
    empty = {"verbs": {}, "options": {"new": {}}, "components": {}}
    monkeypatch.setattr(completing, "CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(completing, "_build", lambda *arguments: built.append(1) or empty)
    assert completions("list ") == completions("list n") == {"new "} and len(built) == 1
    (file,) = (tmp_path / "own/completion").glob("*.json")
    file.write_text("{")
    assert completions("list ") == {"new "} and len(built) == 2
    Path("mine").mkdir()
    for number in (1, 2):
        Path("mine/local.yaml").write_text("seed: 1\n")
        os.utime("mine/local.yaml", (number, number))
        assert completions("list --config-dir mine ") == {"new "} and len(built) == 2 + number


def test_completion_works_without_writable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(completing, "CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(
        completing, "_build", lambda *arguments: {"verbs": {}, "options": {"new": {}}, "components": {}}
    )
    assert completions("list ") == {"new "}


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ("bash", ["my\\ texts/a\\&b ", "x"]),
        ("zsh", ["data.path=my\\ texts/a\\&b ", "data.path=x"]),
        ("fish", ["data.path=my texts/a&b", "data.path=x"]),
    ],
)
def test_candidates_are_escaped_for_each_shell(shell: str, expected: list[str]) -> None:
    assert list(format_for_shell(["data.path=my texts/a&b ", "data.path=x", "a\nb"], "data.path=", shell)) == expected


def test_completion_errors_print_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["bash"], ["bash", "lmtool pre", "more"], ["bash", "lmtool pretrain --plugin no.such model="]):
        assert cli.main(["completion", "query", *words]) == 0
    monkeypatch.setattr(completing, "table", lambda *arguments: 1 / 0)
    assert cli.main(["completion", "query", "bash", "lmtool pretrain model="]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("words", "hint"), [([], "lmtool completion bash"), (["zhs"], "lmtool completion zsh")])
def test_missing_or_misspelled_shell_is_refused(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", *words]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_call_completion_query(shell: str) -> None:
    script = SCRIPTS[shell]
    assert f"lmtool completion query {shell}" in script and script.endswith("\n")
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_script_completes_words(working_folder: Path, cache: Path) -> None:
    """The script runs in a real bash, which splits words at `=`; only the part after `=` is completed."""
    completions("pretrain ")  # builds the table
    prelude = f"""
    lmtool() {{ {shlex.quote(sys.executable)} -c 'import sys
from lmtool.cli import completion
from lmtool.cli import main as cli
completion.CACHE = "{cache}"
sys.exit(cli.main(sys.argv[1:]))' "$@"; }}
    source <(lmtool completion bash)
    complete -p lmtool
    """
    line = "lmtool pretrain model=bert_t"
    asked = f'COMP_LINE="{line}" COMP_POINT={len(line)}; _lmtool; declare -p COMPREPLY'
    without = "unset COMP_LINE; COMP_WORDS=(lmtool res); _lmtool; declare -p COMPREPLY"
    done = subprocess.run(
        ["bash", "-c", f"{prelude}\n{asked}\n{without}"], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "complete -o nospace -F _lmtool lmtool"
    assert lines[1:] == ['declare -a COMPREPLY=([0]="bert_tiny ")', 'declare -a COMPREPLY=([0]="resume ")']


def test_completion_imports_no_third_party_library() -> None:
    completions("pretrain ")
    code = "import sys\nfrom lmtool.cli import completion\ncompletion.CACHE = sys.argv[1]\n"
    code += "assert completion.candidates('lmtool pretrain model=bert_t')\n"
    code += "print(sorted({'torch', 'hydra', 'omegaconf', 'pydantic', 'numpy', 'yaml'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, completing.CACHE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
