"""Teachers that do not fit a student are refused when the configuration is composed, with a hint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import finetune, merge_overrides, pretrain, working_in
from tests.weights.published_folders import make, make_classifier

SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.feedforward_size=16"]
SHORT = [*SMALL, "model.vocab_size=300", "max_steps=1", "max_epochs=null"]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/sst2, runs/mlm and a published RoBERTa."""
    place = tmp_path_factory.mktemp("teachers")
    with working_in(place):
        finetune("sst2", "model=bert_tiny", "checkpoint=none", "model.max_positions=64", *SHORT)
        pretrain("mlm", "objective=mlm", "objective.pairs=none", *SHORT)
        make("roberta", place / "roberta")
    return place


def error_of(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    capsys.readouterr()
    assert cli.main([*typed, "device=cpu"]) == 2
    return capsys.readouterr().err


_OF_SST2 = "distill.teacher=runs/sst2"
ROWS = ["finetune", "task.path=rows", "model=bert_tiny", "checkpoint=none", *SHORT]
STUDENT = [*ROWS, "task=sst2", "distill=soft", "max_length=32"]
PRETRAINED = ["pretrain", "data=text", "data.path=text.txt", "max_length=32", "distill=soft", *SHORT]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (STUDENT, "distill.terms.soft learns from a teacher, but no teacher is set", "set distill.teacher=RUN"),
        ([*STUDENT, "distill.teacher=runs/nobody"], "distill.teacher=runs/nobody: no such folder", "use a run"),
        ([*STUDENT, "distill.teachers=[runs/sst2,runs/no]"], "distill.teachers=runs/no: no such folder", "use a run"),
        (
            [*STUDENT, "distill.teacher=runs/mlm"],
            "distill.teacher=runs/mlm was trained for mlm, but the student learns task=sst2",
            "lmtool finetune task=sst2 trains a teacher",
        ),
        (
            [*PRETRAINED, "model=bert_tiny", "distill.teacher=runs/sst2"],
            "distill.teacher=runs/sst2 was trained for sst2, but the student learns mlm",
            "use another teacher",
        ),
        (
            [*PRETRAINED, "model=bert_tiny", "objective=span", "distill.teacher=runs/mlm"],
            "distill.teacher=runs/mlm was trained for mlm, but the student learns span",
            "set objective=mlm",
        ),
        (
            [*PRETRAINED, "model=electra_tiny", "objective=rtd", "distill.teacher=runs/mlm"],
            "with objective=rtd the student generates part of its inputs",
            "set objective=mlm",
        ),
        (
            [*ROWS, "task=custom", "task.kind=regression", "task.name=sst2", "distill=soft", _OF_SST2],
            "its task sst2 is of kind classification, but the student's is of kind regression",
            "use another teacher",
        ),
        (
            [*STUDENT, "distill.teacher=runs/sst2", "task.labels=['0', good]"],
            "its labels are negative, positive, but the student's are 0, good",
            "use another teacher",
        ),
        (
            [*ROWS, "task=sst2", "distill=soft", "distill.teacher=runs/sst2", "max_length=100"],
            "max_length=100 is more than the model.max_positions=64 of distill.teacher=runs/sst2",
            "set max_length=64",
        ),
        (
            [*STUDENT, "distill.teacher=runs/sst2", "model.vocab_size=4000"],
            "model.vocab_size=4000, but distill.teacher=runs/sst2 has model.vocab_size=300",
            "set model.vocab_size=300",
        ),
        (
            [*STUDENT, "distill.teacher=runs/sst2", "tokenizer=bytebpe", "tokenizer.special_tokens=roberta"],
            "tokenizer.name=bytebpe, but distill.teacher=runs/sst2 has tokenizer.name=wordpiece",
            "set tokenizer=auto, which uses the teacher's tokenizer",
        ),
        (
            [*PRETRAINED, "model=bert_tiny", "objective=mlm", "distill.teacher=roberta"],
            "distill.teacher=roberta has model=roberta, and the student has model=bert: their text formats differ",
            "set model=roberta",
        ),
        (
            [*STUDENT, "distill.teachers=[runs/sst2,runs/sst2]"],
            "teachers names a teacher twice",
            "",
        ),
        (
            [*STUDENT, "distill.teachers=[runs/sst2]", "distill.teacher_weights=[1,2]"],
            "teacher_weights=[1.0, 2.0] must have one number per teacher, but teachers has 1 teacher",
            "",
        ),
        ([*ROWS, "task=sst2", "distill=standard", _OF_SST2], "no term has a weight above 0", "set distill=soft"),
    ],
)  # fmt: skip
def test_unsuitable_teacher_is_refused(teachers, monkeypatch, capsys, words, message, hint):
    monkeypatch.chdir(teachers)
    error = error_of(capsys, *merge_overrides(words))
    assert message in error and hint in error, error
    assert sorted(path.name for path in Path("runs").iterdir() if not path.is_symlink()) == ["mlm", "sst2"]


def test_teacher_and_other_errors_are_reported_together(teachers, monkeypatch, capsys):
    monkeypatch.chdir(teachers)
    error = error_of(
        capsys, *merge_overrides(STUDENT, ["distill.teacher=runs/nobody", "model.num_heads=3", "optimizer.lr=-1"])
    )
    assert "runs/nobody: no such folder" in error and "optimizer.lr" in error and "heads" in error


def test_damaged_teacher_is_refused(teachers, monkeypatch, capsys):
    monkeypatch.chdir(teachers)
    shutil.copytree("runs/sst2", "broken")
    (config,) = Path("broken/checkpoints").glob("step_*/config.json")
    config.write_text(config.read_text()[:-20])
    error = error_of(capsys, *STUDENT, "distill.teacher=broken")
    assert f"error: {config}" in error and "hint: " in error


@pytest.mark.parametrize("terms", [["distill=states"], ["distill=soft", "distill.initialize=alternate"]], ids="-".join)
def test_published_classifier_teaches_hidden_states(place, terms):
    """The teacher parses special tokens in texts and the student does not; vocabulary and rules are equal."""
    make_classifier("bert", place / "published", names=["negative", "positive"])
    sizes = ["model.num_layers=1", "model.hidden_size=36", "model.num_heads=3", "model.feedforward_size=52"]
    words = ["model.max_positions=160", "model.vocab_size=330", "max_steps=1", "max_epochs=null", *sizes, *terms]
    finetune("student", "model=bert_tiny", "checkpoint=none", "max_length=32", "distill.teacher=published", *words)


def test_student_uses_tokenizer_of_teacher(teachers, monkeypatch, capsys):
    """The rows share no word with the teacher's, so a vocabulary trained on them would differ."""
    monkeypatch.chdir(teachers)
    Path("others").mkdir()
    for split in ("train", "dev"):
        lines = [f"{'zwei' if number % 2 else 'drei'} Worte {number}\t{number % 2}" for number in range(20)]
        Path(f"others/{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    words = [*STUDENT, "distill.teacher=runs/sst2", "task.path=others", "batch_examples=8", "cache_dir=cache"]
    assert cli.main(merge_overrides([*words, "name=student", "precision=fp32", "device=cpu"])) == 0
    (ours,), (theirs,) = (Path(f"runs/{name}/checkpoints").glob("step_*") for name in ("student", "sst2"))
    assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    shutil.rmtree("runs/student")
