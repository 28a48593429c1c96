"""Sweep values in YAML: the shipped grid and grids of users."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.config import compose
from lmtool.sweeps.jobs import jobs_of, with_grid

BERT = ["finetune", "task=pydocs", "model=bert_tiny", "sweep=bert"]


@pytest.fixture
def sweep_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "sweep").mkdir(parents=True)
    return tmp_path / "conf" / "sweep" / "mine.yaml"


def printed_values(shown: str) -> list[tuple[str, ...]]:
    """Batch, learning rate and epochs of each job in the output of --cfg job."""
    keys = ("batch_examples", "  lr", "max_epochs")
    return list(zip(*(re.findall(rf"^{key}: (.*)$", shown, re.MULTILINE) for key in keys), strict=True))


def test_bert_grid_has_18_combinations() -> None:
    accepted = compose.accepted_overrides("finetune")
    typed = with_grid(["sweep=bert", "task=rte"], accepted, "finetune", [])
    jobs = [dict(text.lstrip("+").split("=") for text in job.values) for job in jobs_of(typed)]
    assert len(jobs) == 18
    assert {(job["batch_examples"], job["optimizer.lr"], job["max_epochs"]) for job in jobs} == {
        (size, rate, epochs) for size in ("16", "32") for rate in ("5e-05", "3e-05", "2e-05") for epochs in "234"
    }


def test_distill_none_drops_distillation_keys() -> None:
    words = ["distill=soft,none", "distill.teacher=runs/x", "optimizer.lr=1e-4"]
    accepted = compose.accepted_overrides("finetune")
    soft, none = jobs_of(compose.read_overrides(words, accepted, multirun=True))
    assert [text.partition("=")[0] for text in soft.values] == ["++distill.teacher", "++optimizer.lr"]
    assert none.choices[-1].endswith("distill=none") and [*none.values] == soft.values[1:]
    (alone,) = jobs_of(compose.read_overrides(["distill=none", *words[1:]], accepted, multirun=True))
    assert len(alone.values) == 2  # a single choice keeps every key, and composition refuses distill.teacher


def test_command_line_values_override_grid(sweep_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BERT, "-m", "optimizer.lr=1e-4", "max_epochs=1", "--cfg", "job"]) == 0
    assert printed_values(capsys.readouterr().out) == [("16", "0.0001", "1.0"), ("32", "0.0001", "1.0")]
    assert cli.main([*BERT, "optimizer.lr=1e-4", "max_epochs=1", "batch_examples=8", "--cfg", "job"]) == 0
    assert printed_values(capsys.readouterr().out) == [("8", "0.0001", "1.0")]


@pytest.mark.parametrize("command", [["finetune"], ["plan", "finetune"]])
def test_grid_without_multirun_is_refused(
    sweep_yaml: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *BERT[1:]]) == 2
    error = capsys.readouterr().err
    assert "sweep=bert has several values for batch_examples, optimizer.lr, max_epochs" in error
    assert "lmtool finetune -m sweep=bert" in error and not Path("runs").exists()


def run(sweep_yaml: Path, params: str, *words: str) -> int:
    sweep_yaml.write_text(f"# @package _global_\nhydra:\n  sweeper:\n    params:\n      {params}\n")
    return cli.main(
        ["pretrain", "-m", "model=bert_tiny", "--config-dir", str(sweep_yaml.parents[1]), "sweep=mine", *words]
    )


def test_user_grid_runs_every_combination(sweep_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda verb, config: calls.append((config.seed, config.max_length)))
    assert run(sweep_yaml, "seed: range(1,3)", "max_length=32,64") == 0
    assert calls == [(1, 32), (1, 64), (2, 32), (2, 64)]
    # A choice between several grids is refused, because the jobs are unknown.
    sweep_yaml.with_name("other.yaml").write_text("# @package _global_\nseed: 1\n")
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "--config-dir", "conf", "sweep=mine,other"]) == 2


@pytest.mark.parametrize(
    ("params", "words", "message"),
    [
        ("optimizr.lr: 1,2", [], "unknown key optimizr.lr"),
        pytest.param("seed: [1, 2]", [], "seed", marks=pytest.mark.slow),
        ("batch_tokens: 512,1024", ["batch_examples=8"], "both set the batch size"),
        ("objective: mlm,mlmm", [], "objective=mlmm is not one of"),
        pytest.param("seed: 1,x", [], "seed", marks=pytest.mark.slow),
        pytest.param("seed: '1,2)'", [], "seed", marks=pytest.mark.slow),
    ],
)
def test_errors_in_grid_stop_before_first_job(
    sweep_yaml: Path,
    params: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("a job ran"))
    assert run(sweep_yaml, params, *words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not Path("runs").exists(), error
