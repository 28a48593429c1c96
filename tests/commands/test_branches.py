"""Branches continue a run from a checkpoint bit for bit; a budget can grow if earlier steps stay the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.runs.files import read_rows
from lmtool.runs.finding import saved_steps
from tests.commands.conftest import TINY, finetune, pretrain, work_in_copy, working_in

KEPT = ["max_steps=6", "checkpoint_every=1", "evaluate_every=2", "keep=all"]
WSD = ["schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_steps=2"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a finished run, runs/trunk."""
    place = tmp_path_factory.mktemp("trunk")
    with working_in(place):
        pretrain("trunk", *KEPT, *WSD)
    yield place


@pytest.fixture
def trunk(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_in_copy(workplace, tmp_path / "place", monkeypatch)
    return Path("runs/trunk")


def lmtool(*words: str, status: int = 0) -> None:
    assert cli.main(list(words)) == status


def bytes_of(run: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(run.rglob("*")) if path.is_file()
    }


def outcome(run: Path, step: int = 6, after: int = 0) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metric rows after step `after`, without times and the best value so far, and the tensors of a checkpoint, with
    the optimizer's."""
    own = ("tokens_per_second", "seconds", "best")
    rows = [
        {key: row[key] for key in row if key not in own}
        for row in read_rows(run / "metrics.jsonl")
        if row["step"] > after
    ]
    files = [run / f"checkpoints/step_{step:08d}/{name}.safetensors" for name in ("model", "optimizer")]
    return rows, {
        f"{file.name}:{name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()
    }


def test_branch_with_same_keys_equals_uninterrupted_run(trunk: Path) -> None:
    before = bytes_of(trunk)
    lmtool("pretrain", f"branch={trunk}@3", "name=first", "log_every=1")
    lmtool("pretrain", "branch=runs/first@5", "name=second", "data=text")
    assert bytes_of(trunk) == before
    expected = outcome(trunk)
    assert len(expected[0]) == 9 and outcome(Path("runs/first")) == outcome(Path("runs/second")) == expected
    result = json.loads(Path("runs/second/result.json").read_text())
    assert [entry["checkpoint"] for entry in result["lineage"]] == ["runs/trunk@3", "runs/first@5"]
    assert [entry["step"] for entry in result["lineage"]] == [3, 5] and result["lineage"][0]["tokens"] > 0
    assert result["steps"] == 6 and result["best_step"] == 6


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_tiny",
        pytest.param("mixture", marks=pytest.mark.slow),
        pytest.param("distilled", marks=pytest.mark.slow),
        pytest.param("tuned", marks=pytest.mark.slow),
        pytest.param("electra_tiny", marks=pytest.mark.slow),
        pytest.param("peers", marks=pytest.mark.slow),
        pytest.param("phases", marks=pytest.mark.slow),
    ],
)
def test_branch_of_each_learner_equals_uninterrupted_run(trunk: Path, kind: str) -> None:
    budget = ["max_steps=4", "checkpoint_every=2", "keep=all"]
    sizes = [word for word in TINY if word.startswith("model.")]
    if kind == "tuned":
        run = finetune("run", f"checkpoint={trunk}", "tuning=lora", "tuning.dropout=0.1", *budget)
    elif kind == "peers":
        more = ["distill=codistillation", "distill.burn_in_steps=1", "distill.refresh_steps=2"]
        run = finetune("run", "model=bert_tiny", *sizes, "checkpoint=none", *more, *budget)
    else:
        more = {
            "mixture": ["objective=mixture", "objective.members=[mlm,rtd]", "objective.with.rtd.generator_size=0.5"],
            "phases": ["phases=[{share: 0.25, max_length: 16},{share: 0.75}]"],
            "distilled": ["distill=soft", f"distill.teacher={trunk}"],
        }.get(kind, [])
        run = pretrain("run", *more, *budget, model=kind if kind.endswith("_tiny") else "bert_tiny")
    verb = "finetune" if kind in ("tuned", "peers") else "pretrain"
    lmtool(verb, f"branch={run}@2", "name=branch")
    assert outcome(Path("runs/branch"), 4) == outcome(run, 4)
    if kind == "phases":  # another budget would end the first phase at another step
        lmtool(verb, f"branch={run}@2", "name=longer", "max_steps=8", status=2)


def test_branch_accepts_other_schedule_and_budget(trunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier rows come from the trunk; once started, a branch does not need its trunk."""
    words = ["pretrain", f"branch={trunk}@4", "name=tail", "schedule=linear", "max_steps=8", "evaluate_every=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmtool.session.fit.train", raise_killed)
        lmtool(*words, status=1)
    assert [folder.name for folder in saved_steps(Path("runs/tail/checkpoints"))] == ["step_00000004"]
    shutil.rmtree(trunk)
    capsys.readouterr()
    lmtool(*words)
    assert "branches from runs/trunk@4" in capsys.readouterr().out
    rows = read_rows(Path("runs/tail/metrics.jsonl"))
    steps = [row["step"] for row in rows if row["split"] == "train"]
    assert steps == list(range(1, 9))
    rates = [row["learning_rate"] for row in rows if row["split"] == "train"]
    assert rates[:4] == [0.0005, 0.001, 0.001, 0.001] and rates[4:] == pytest.approx(
        [0.004 / 7, 0.003 / 7, 0.002 / 7, 0.001 / 7]
    )
    result = json.loads(Path("runs/tail/result.json").read_text())
    assert result["steps"] == 8 and result["best_step"] in (4, 8)


def raise_killed(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize(
    "words, said",
    [
        ("branch=runs/trunk@7 name=b", "runs/trunk has no checkpoint of step 7; it has 1, 2, 3, 4, 5, 6"),
        ("branch=runs/trunk@2 name=b branch=runs/trunk@3", "a key may be set only once"),
        ("branch=runs/trunk@x name=b", "'x' is not a step"),
        ("branch=trunk@2 name=b", "set branch=runs/trunk@2"),
        ("branch=runs/trunk/checkpoints/step_00000002 name=b", "set branch=runs/trunk@2"),
        ("branch=runs/trunk@2", "set name=NEW"),
        ("branch=runs/trunk@2 name=trunk", "is the trunk"),
        ("branch=runs/trunk@2 run_dir=runs/trunk", "is the trunk"),
        ("branch=runs/trunk@2 name=b checkpoint=runs/trunk", "a run starts from only one of them"),
        ("branch=runs/trunk name=b", "max_steps=6 is used up at runs/trunk@6"),
        ("branch=runs/trunk@2 name=b optimizer.lr=1 seed=3", "optimizer.lr 0.001 -> 1.0"),
        ("branch=runs/trunk@2 name=b optimizer.lr=1 seed=3", "seed 0 -> 3"),
        (
            "branch=runs/trunk@2 name=b model=gpt_tiny",
            "model=gpt_tiny: branch=runs/trunk@2 cannot change what its trunk",
        ),
        ("branch=runs/trunk@2 name=b schedule=wdd", "did you mean schedule=wsd?"),
        ("-m branch=runs/trunk@2 name=b seed=1,2", "start each branch separately"),
    ],
)
def test_invalid_branch_is_refused(trunk: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    lmtool("pretrain", *words.split(), status=2)
    assert said in capsys.readouterr().err
    assert not Path("runs/b").exists()


def test_branch_refuses_damaged_checkpoint_or_changed_data(trunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trunk / "checkpoints/step_00000003/optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    lmtool("pretrain", f"branch={trunk}@3", "name=b", status=2)
    assert f"{file} is damaged" in (error := capsys.readouterr().err) and "branch=runs/trunk@4, which is" in error
    lmtool("finetune", f"branch={trunk}@4", "name=b", status=2)
    assert "lmtool pretrain branch=runs/trunk@4" in capsys.readouterr().err
    Path("text.txt").write_text(Path("text.txt").read_text() + "More.\n")
    lmtool("pretrain", f"branch={trunk}@4", "name=b", status=2)
    assert "changed after step_00000004" in capsys.readouterr().err
    assert not Path("runs/b").exists()


def test_extended_run_equals_longer_run(trunk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An extended run with a constant schedule equals a longer one; wsd is refused once its decay has started."""
    level = ["schedule=constant", "schedule.warmup_steps=2", "evaluate_every=2", "checkpoint_every=1"]
    long = pretrain("long", *level, "max_steps=5")
    short = pretrain("short", *level, "max_steps=3")
    earlier = json.loads((short / "result.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmtool.training.loop.score", raise_killed)
        pretrain("short", *level, "max_steps=5", status=1)
    kept = json.loads((short / "result.json").read_text())
    assert kept == {**earlier, "status": "extended"}
    assert cli.main(["resume", str(short)]) == 0
    rows, tensors = outcome(short, 5)
    rows.remove(
        next(row for row in rows if row["step"] == 3 and row["split"] == "validation")
    )  # the validation at its earlier end
    assert (rows, tensors) == outcome(long, 5)
    assert json.loads((short / "result.json").read_text())["steps"] == 5
    capsys.readouterr()
    words = ["schedule.warmup_steps=2", "schedule.decay_steps=2", "schedule=wsd", *KEPT]
    pretrain("trunk", *words, "max_steps=9", status=2)
    error = capsys.readouterr().err
    assert "cannot be extended (max_steps 6 -> 9): schedule=wsd depends on the end of the run" in error
    assert "hint: lmtool pretrain branch=runs/trunk@6 max_steps=9 name=NEW" in error
    pretrain("short", *level, "max_steps=4", status=2)
    assert "max_steps 5 -> 4" in capsys.readouterr().err
