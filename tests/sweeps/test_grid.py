"""Values to sweep over that stand in YAML: shipped, and a user's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.config import compose, overrides
from lmtool.sweeps.jobs import jobs_of, with_grid

BERT = ["finetune", "task=pydocs", "model=bert_tiny", "sweep=bert"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "sweep").mkdir(parents=True)
    return tmp_path / "conf" / "sweep" / "mine.yaml"


def values(shown: str) -> list[tuple[str, ...]]:
    """Batch, rate and epochs of each job that --cfg job printed."""
    keys = ("batch_examples", "  lr", "max_epochs")
    return list(zip(*(re.findall(rf"^{key}: (.*)$", shown, re.MULTILINE) for key in keys), strict=True))


def test_berts_grid() -> None:
    accepted = compose.accepted_overrides("finetune")
    typed = with_grid(["sweep=bert", "task=rte"], accepted, "finetune", [])
    jobs = [dict(text.lstrip("+").split("=") for text in job.values) for job in jobs_of(typed)]
    assert len(jobs) == 18
    assert {(job["batch_examples"], job["optimizer.lr"], job["max_epochs"]) for job in jobs} == {
        (size, rate, epochs) for size in ("16", "32") for rate in ("5e-05", "3e-05", "2e-05") for epochs in "234"
    }


def test_the_job_of_none_goes_without_the_keys_of_the_others() -> None:
    words = ["distill=soft,none", "distill.teacher=runs/x", "optimizer.lr=1e-4"]
    accepted = compose.accepted_overrides("finetune")
    soft, none = jobs_of(overrides.read(words, accepted, multirun=True))
    assert [text.partition("=")[0] for text in soft.values] == ["++distill.teacher", "++optimizer.lr"]
    assert none.choices[-1].endswith("distill=none") and [*none.values] == soft.values[1:]
    (alone,) = jobs_of(overrides.read(["distill=none", *words[1:]], accepted, multirun=True))
    assert len(alone.values) == 2  # nothing else was meant: the key is refused by its name


def test_what_is_typed_wins(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BERT, "-m", "optimizer.lr=1e-4", "max_epochs=1", "--cfg", "job"]) == 0
    assert values(capsys.readouterr().out) == [("16", "0.0001", "1.0"), ("32", "0.0001", "1.0")]
    assert cli.main([*BERT, "optimizer.lr=1e-4", "max_epochs=1", "batch_examples=8", "--cfg", "job"]) == 0
    assert values(capsys.readouterr().out) == [("8", "0.0001", "1.0")]


@pytest.mark.parametrize("command", [["finetune"], ["plan", "finetune"]])
def test_a_grid_is_no_run(own: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, *BERT[1:]]) == 2
    error = capsys.readouterr().err
    assert "sweep=bert has several values for batch_examples, optimizer.lr, max_epochs" in error
    assert "lmtool finetune -m sweep=bert" in error and not Path("runs").exists()


def run(own: Path, params: str, *words: str) -> int:
    own.write_text(f"# @package _global_\nhydra:\n  sweeper:\n    params:\n      {params}\n")
    return cli.main(["pretrain", "-m", "model=bert_tiny", "--config-dir", str(own.parents[1]), "sweep=mine", *words])


def test_a_grid_of_ones_own_runs(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda verb, config: calls.append((config.seed, config.max_length)))
    assert run(own, "seed: range(1,3)", "max_length=32,64") == 0
    assert calls == [(1, 32), (1, 64), (2, 32), (2, 64)]
    # One of several choices with a grid of its own: its jobs are not known.
    own.with_name("other.yaml").write_text("# @package _global_\nseed: 1\n")
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "--config-dir", "conf", "sweep=mine,other"]) == 2


@pytest.mark.parametrize(
    ("params", "words", "says"),
    [
        ("optimizr.lr: 1,2", [], "unknown key optimizr.lr"),
        pytest.param("seed: [1, 2]", [], "seed", marks=pytest.mark.slow),
        ("batch_tokens: 512,1024", ["batch_examples=8"], "both set the batch size"),
        ("objective: mlm,mlmm", [], "objective=mlmm is not one of"),
        pytest.param("seed: 1,x", [], "seed", marks=pytest.mark.slow),
        pytest.param("seed: '1,2)'", [], "seed", marks=pytest.mark.slow),
    ],
)
def test_mistakes_in_a_grid(
    own: Path,
    params: str,
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("a job ran"))
    assert run(own, params, *words) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error and not Path("runs").exists(), error
