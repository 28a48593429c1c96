"""Runs with frozen teachers, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.costs.plan import plan_of
from lmtool.distillation.configs.base import NoDistillConfig
from lmtool.runs.finding import checkpoint_folder
from lmtool.session.labeled import data_to_learn
from lmtool.training.precision import Precision
from lmtool.weights.assemble import assemble

SHORT = ["offline=true", "max_steps=4", "batch_examples=8", "log_every=1", "evaluate_every=2", "max_epochs=null"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    rows = [f"{'good' if n % 2 else 'bad'} film {n}\t{n % 2}" for n in range(60)]
    for split, part in (("train", rows[:40]), ("dev", rows[40:])):
        (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *part]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finetune("teacher")
    return folder


def finetune(name, *typed):
    task = [
        "task=custom",
        "task.kind=classification",
        "task.path=.",
        "model=bert_tiny",
        "checkpoint=none",
        "model.hidden_size=32",
    ]
    assert cli.main(["finetune", *task, *SHORT, "tokenizer.vocab_size=300", f"name={name}", *typed]) == 0


# Hard labels of a file and interchange runs have separate tests.
@pytest.mark.parametrize(
    "preset", ["soft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hard", "interchange"))]
)
def test_student_of_a_run_trains_and_predicts(place, monkeypatch, preset):
    monkeypatch.chdir(place)
    before = load_file(checkpoint_folder("runs/teacher") / "model.safetensors")
    finetune(preset, f"distill={preset}", "distill.teacher=runs/teacher", "model.num_layers=1")
    rows = list(map(json.loads, Path(f"runs/{preset}/metrics.jsonl").read_text().splitlines()))
    both = {"loss_custom", "loss_soft"}
    # A single term is not shown apart from the loss.
    shown = {"soft": both, "hard": set(), "interchange": both | {"loss_interchange"}}[preset]
    assert all(shown == {key for key in row if key.startswith("loss_")} for row in rows if row["split"] == "train")
    after = load_file(checkpoint_folder("runs/teacher") / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    summary = json.loads(Path(f"runs/{preset}/result.json").read_text())["distillation"]
    assert summary["fidelity"]["n"] == 20 and 0 <= summary["fidelity"]["value"] <= 1
    # For a student of one layer only the embeddings are aligned.
    cells = summary["interchange_accuracy"]["cells"]
    assert {(cell["side"], cell["student_layer"], cell["teacher_layer"]) for cell in cells} == {("inputs", 0, 0)}
    assert sum(cell["n"] for cell in cells) == summary["interchange_accuracy"]["n"] == 20
    # A student predicts like any other model.
    assert cli.main(["predict", f"checkpoint=runs/{preset}", "text=a good film"]) == 0


def test_unknown_term_suggests_nearest_name(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    typed = ["finetune", "task=pydocs", "model=bert_tiny", "checkpoint=none", "distill=soft"]
    assert cli.main([*typed, "distill.terms.sfot.weight=1", "distill.terms.soft.temperature=-1"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean distill.terms.soft.weight=1?" in shown
    assert "distill.terms.soft.temperature: given -1" in shown


def mixed(name, *typed):
    """A student of two tasks, `one` and `two`, of the rows of the folder."""
    members = "task.members=[{kind: classification, name: one, path: .},{kind: classification, name: two, path: .}]"
    model = ["model=bert_tiny", "model.vocab_size=300", "checkpoint=none"]
    words = ["finetune", "task=mixture", members, *model, *SHORT, f"name={name}"]
    return cli.main([*words, *typed])


@pytest.fixture(scope="module")
def several(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("one", "two"):
            finetune(name, f"task.name={name}", f"seed={ord(name[0])}")
        finetune("other", "task.name=one", "seed=5")
    return place


def test_teachers_of_different_tasks_teach_different_heads(several, monkeypatch, capsys):
    monkeypatch.chdir(several)
    teachers = "distill.teachers=[runs/one,runs/two,runs/other]"
    weights = ["distill.teacher_weights=[3,1,1]", "distill.average=logits"]
    assert mixed("mixed", "distill=soft", teachers, *weights, "distill.gold=0.1") == 0
    rows = [json.loads(row) for row in Path("runs/mixed/metrics.jsonl").read_text().splitlines()]
    shown = {key for row in rows if row["split"] == "train" for key in row if key.startswith("loss_")}
    assert shown == {"loss_one", "loss_two", "loss_soft_one", "loss_soft_two"}
    result = json.loads(Path("runs/mixed/result.json").read_text())["distillation"]
    assert set(result["teachers"]) == {"runs/one", "runs/two", "runs/other"}
    assert len(set(result["teachers"].values())) == 3
    assert [model["name"] for model in result["models"]][-1] == "student"
    # Only one task has a teacher, and the screen says so.
    assert mixed("half", "distill=soft", "distill.teacher=runs/one") == 0
    assert "gold only" in capsys.readouterr().out


def test_resume_with_changed_teacher_is_refused(several, monkeypatch, capsys):
    monkeypatch.chdir(several)
    finetune("stopped", "distill=soft", "distill.teacher=runs/teacher", "model.num_layers=1")
    Path("runs/stopped/result.json").unlink()
    shutil.move("runs/teacher", "runs/kept")
    finetune("teacher", "seed=9")
    capsys.readouterr()
    assert cli.main(["resume", "runs/stopped"]) == 2
    shown = capsys.readouterr().err
    assert "the teacher runs/teacher changed after step_00000004 of runs/stopped: sha256 " in shown and " now" in shown
    shutil.rmtree("runs/teacher")
    shutil.move("runs/kept", "runs/teacher")
    assert cli.main(["resume", "runs/stopped"]) == 0


def test_hard_labels_of_a_file_match_the_teacher(several, monkeypatch, capsys):
    """Training on the saved predictions of a deleted teacher equals training with the teacher."""
    monkeypatch.chdir(several)
    assert cli.main(["predict", "checkpoint=runs/teacher", "input=train.tsv", "output=said.jsonl"]) == 0
    finetune("with", "distill=hard", "distill.teacher=runs/teacher", "tokenizer=folder", "tokenizer.path=runs/teacher")
    shutil.copytree("runs/teacher/checkpoints", "vocabulary")
    shutil.move("runs/teacher", "away")
    (folder,) = Path("vocabulary").glob("step_*4")
    typed = ["distill=hard", "distill.predictions=said.jsonl", "tokenizer=folder", f"tokenizer.path={folder}"]
    finetune("without", *typed)
    shutil.move("away", "runs/teacher")
    weights = [load_file(checkpoint_folder(f"runs/{name}") / "model.safetensors") for name in ("with", "without")]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    assert "40 of said.jsonl" in capsys.readouterr().out

    lines = Path("said.jsonl").read_text().splitlines()
    Path("part.jsonl").write_text("\n".join([*lines[:30], lines[30].replace("film", "flim")]) + "\n")
    words = ["finetune", "task=custom", "task.kind=classification", "task.path=.", "model=bert_tiny", "checkpoint=none"]
    for file, message in (
        (
            "part.jsonl",
            "has predictions for only 30 of 40 training rows: the file has no prediction, or several, for",
        ),
        ("nothing.jsonl", "distill.predictions=nothing.jsonl: no such file"),
        ("dev.tsv", "distill.predictions=dev.tsv has no column prediction"),
    ):
        assert cli.main([*words, *SHORT, "name=bad", "distill=hard", f"distill.predictions={file}"]) == 2
        assert message in capsys.readouterr().err


def test_plan_counts_flops_and_memory_of_a_teacher(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = ["task=custom", "task.kind=classification", "task.path=.", "model=bert_tiny", "checkpoint=none"]
    typed = ["model.hidden_size=32", "tokenizer.vocab_size=300", *SHORT, "distill=soft", "distill.teacher=runs/teacher"]
    config = cli.configuration("finetune", cli.Arguments(rest=[*words, *typed]), running=False)
    config, *_ = data_to_learn(config)
    precision = Precision("fp32", torch.device("cpu"), "")
    alone = config.model_copy(update={"distill": NoDistillConfig()})
    with torch.device("meta"):
        learner, _ = assemble(alone, None)
    metadata = {"steps_per_epoch": 5, "tokens_per_epoch": 400, "mean_length": 8.0}
    with_teacher, without = (plan_of(each, learner, metadata, precision) for each in (config, alone))
    # The teacher has the student's sizes: a third of the work of a step, and its weights once.
    assert with_teacher.flops_per_token == pytest.approx(without.flops_per_token * 4 / 3)
    count = sum(tensor.numel() for tensor in learner.parameters())
    assert with_teacher.memory_bytes == {**without.memory_bytes, "teachers": 4 * count}
