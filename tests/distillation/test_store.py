"""Runs with stored teacher outputs (distill.store): same losses as with the teacher, reuse, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli

SHORT = ["offline=true", "max_steps=4", "batch_examples=8", "log_every=1", "evaluate_every=4", "max_epochs=null"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    rows = [f"{'good' if n % 2 else 'bad'} film {n}\t{n % 2}" for n in range(60)]
    for split, part in (("train", rows[:40]), ("dev", rows[40:])):
        (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *part]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finetune("teacher")
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def finetune(name, *typed, status=0):
    task = ["task=custom", "task.kind=classification", "task.path=.", "model=bert_tiny", "checkpoint=none"]
    typed = typed if any("vocab_size" in word for word in typed) else ("tokenizer.vocab_size=300", *typed)
    given = [*task, *SHORT, "cache_dir=cache", f"name={name}", *typed]
    assert cli.main(["finetune", *given]) == status


def distill(name, *typed, status=0):
    finetune(name, "distill=soft", "distill.teacher=runs/teacher", "model.num_layers=1", *typed, status=status)


def losses(name, term="soft"):
    rows = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [row[f"loss_{term}"] for row in rows if row["split"] == "train"]


def test_losses_with_the_store_match_the_running_teacher(capsys):
    distill("live")
    distill("made", "distill.store=true")
    assert "teacher outputs made" in capsys.readouterr().out
    distill("found", "distill.store=true", "model.hidden_size=64", "seed=3")
    assert "teacher outputs found" in capsys.readouterr().out
    assert losses("made") == pytest.approx(losses("live"), rel=1e-3, abs=1e-7)
    assert len([path for path in Path("cache/teachers").iterdir() if not path.name.startswith(".")]) == 1


def test_store_of_other_data_or_settings_is_refused(capsys):
    distill("typed", "distill.store=kept")
    distill("other", "distill.store=kept", "max_length=16", status=2)
    assert (
        "distill.store=kept/outputs contains teacher outputs that this run cannot use: max length"
        in capsys.readouterr().err
    )
    Path("rows/outputs/of mine").mkdir(parents=True)
    distill("rows", "distill.store=rows", status=2)
    assert "without stored teacher outputs" in capsys.readouterr().err
    distill("states", "distill.store=true", "distill.terms.interchange.weight=1", status=2)
    assert "distill.terms.interchange needs the running teacher" in capsys.readouterr().err


def test_store_allows_a_teacher_with_another_tokenizer(capsys):
    other = ["tokenizer.vocab_size=45"]
    distill("bytes", *other, status=2)
    assert (
        "tokenizer.vocab_size=45, but distill.teacher=runs/teacher has tokenizer.vocab_size=300"
        in capsys.readouterr().err
    )
    distill("bytes", *other, "distill.store=true")
    shown = capsys.readouterr().out
    assert "student tokenizer 35 tokens" in shown and "teacher tokenizer" in shown
    assert all(0 < loss < 1 for loss in losses("bytes"))


def test_sweep_makes_the_store_once():
    typed = ["-m", "distill=soft", "distill.teacher=runs/teacher", "distill.store=true", "distill.store_dtype=float16"]
    finetune("swept", *typed, "model.num_layers=1,2")
    logs = [path.read_text() for path in sorted(Path("runs").glob("swept*/**/log.txt"))]
    assert [log.count("teacher outputs made") for log in logs] == [1, 0]
    assert "teacher outputs found" in logs[1]


def test_pretraining_store_matches_the_running_teacher(capsys):
    Path("text.txt").write_text(
        "\n\n".join(f"The {n} films of a good week were bad. Others were good." for n in range(40))
    )
    tiny = ["model=bert_tiny", "model.num_layers=1", "checkpoint=none", "tokenizer.vocab_size=200", "cache_dir=cache"]
    short = [word for word in SHORT if word != "batch_examples=8"]
    typed = [
        "data=text",
        "data.path=text.txt",
        *tiny,
        *short,
        "max_length=32",
        "batch_tokens=96",
        "objective.pairs=none",
    ]
    assert cli.main(["pretrain", *typed, "name=lm"]) == 0
    taught = [
        "distill=soft",
        "distill.teacher=runs/lm",
        "distill.top_k=5",
        "model.hidden_size=64",
        "distill.terms.states.weight=1",
    ]
    for name, more in {"direct": [], "first": ["distill.store=true"], "second": ["distill.store=true"]}.items():
        assert cli.main(["pretrain", *typed, *taught, *more, f"name={name}"]) == 0
    assert "teacher outputs found" in capsys.readouterr().out
    for term in ("soft", "states"):
        of_store = losses("first", term)
        assert of_store == losses("second", term) == pytest.approx(losses("direct", term), rel=1e-3, abs=1e-6)
    assert cli.main(["pretrain", *typed, *taught, "distill.store=true", "seed=7", "name=other"]) == 0
    assert "teacher outputs made" in capsys.readouterr().out
