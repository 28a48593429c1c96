"""`lmtool probe` on runs: text and tasks, several checkpoints, and one plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import finetune, pretrain

pytestmark = pytest.mark.usefixtures("figures")


def probe(*words: str) -> int:
    small = ["examples=200", "held_out=100", "classes=20", "cache_dir=cache", "device=cpu", "precision=fp32"]
    return cli.main(["probe", *words, *small])


def test_probe_scores_layers_of_checkpoints(place: Path, capsys: pytest.CaptureFixture) -> None:
    pretrain("masked", "data.validation_fraction=0.2")
    pretrain("causal", "data.validation_fraction=0.2", model="gpt_tiny")
    assert probe("checkpoint=[runs/masked,runs/causal]", "target=token", "output=out") == 0
    said = capsys.readouterr().out
    assert "runs/causal · token · accuracy" in said and "0 (embedding)" in said and "majority" in said
    details = json.loads(Path("out/probe.json").read_text())
    assert [probes["checkpoint"] for probes in details["checkpoints"]] == ["runs/masked", "runs/causal"]
    for probes in details["checkpoints"]:
        assert probes["n"] == 100 and probes["examples"] == 200 and probes["classes"] == 20
        assert [row["layer"] for row in probes["layers"]] == [0, 1]
        # The embedding identifies the token, with trained and with random weights.
        assert all(probes["layers"][0][weights]["accuracy"] > 0.9 for weights in ("trained", "random"))
        assert 0 < probes["majority"]["accuracy"] < 0.5
    assert Path("out/probe.png").stat().st_size > 5000
    page = Path("out/probe.html").read_text()
    assert page.count("<svg") == 1 and page.count("<table") == 2 and "page: out/probe.html" in said
    # Labeled texts, with the name of the task.
    assert probe("checkpoint=runs/masked", "target=sst2", "task.path=rows", "output=task") == 0
    (probes,) = json.loads(Path("task/probe.json").read_text())["checkpoints"]
    assert probes["n"] == 40 and probes["examples"] == 96 and probes["classes"] == 2
    assert probes["majority"]["accuracy"] == 0.5
    assert probes["layers"][0]["trained"]["accuracy"] > 0.9  # good and bad adjectives
    # Words of tagged sentences, at the first token of each.
    Path("tags").mkdir()
    lines = ["The\tDT", "unbelievable\tJJ", "cat\tNN", "sleeps\tVB", ""] * 12
    for split in ("train", "dev"):
        Path(f"tags/{split}.tsv").write_text("\n".join(lines) + "\n")
    assert probe("checkpoint=runs/masked", "target=pos", "task.path=tags", "output=words") == 0
    (probes,) = json.loads(Path("words/probe.json").read_text())["checkpoints"]
    assert probes["n"] == 48 and probes["layers"][0]["trained"]["accuracy"] == 1.0
    # A test set of one text has no standard error.
    Path("one.txt").write_text("the cat saw the dog near the old ship\n" * 45)
    capsys.readouterr()
    one = ["data=text", "data.path=text.txt", "data.validation=one.txt"]
    assert probe("checkpoint=runs/masked", "target=token", "output=one", *one) == 0
    said = capsys.readouterr().out
    assert "because the test set is a single text" in said and "±" not in said and "nan" not in said
    assert probe("checkpoint=runs/masked", "target=token", "output=rows") == 2
    assert "error: rows is not empty and not a probe of lmtool: it has dev." in capsys.readouterr().err
    finetune("task", "checkpoint=runs/masked", "max_steps=1", "max_epochs=null")
    capsys.readouterr()
    for words, message in (
        (
            ["checkpoint=runs/task", "target=next"],
            "target=next needs text, and the checkpoint",
        ),
        (["checkpoint=runs/masked", "target=task"], "target=task needs a task"),
        (
            ["checkpoint=runs/masked", "target=stsb", "task.path=rows", "task.text=[sentence]"],
            "a probe predicts one class",
        ),
    ):
        assert probe(*words) == 2
        assert message in capsys.readouterr().err


def test_probe_measures_the_evolution_of_layers(place: Path, capsys: pytest.CaptureFixture) -> None:
    shared = ["tokenizer=folder", "tokenizer.path=vocabulary"]
    words = ["tokenizer", "tokenizer=bytebpe", "tokenizer.special_tokens=roberta", "tokenizer.vocab_size=300"]
    assert cli.main([*words, "data=text", "data.path=text.txt", "output=vocabulary"]) == 0
    pretrain("masked", "data.validation_fraction=0.2", *shared, model="roberta_tiny")
    pretrain("causal", "data.validation_fraction=0.2", *shared, model="gpt_tiny")
    pretrain("denoised", "data.validation_fraction=0.2", *shared, model="bart_tiny")
    pretrain("other", "data.validation_fraction=0.2", "model.vocab_size=500", model="gpt_tiny")
    capsys.readouterr()
    words = ["target=evolution", "cache_dir=cache", "device=cpu", "precision=fp32", "classes=20"]
    runs = "checkpoint=[runs/masked,runs/causal,runs/denoised]"
    assert cli.main(["probe", runs, *words, "clusters=15", "examples=400", "output=out"]) == 0
    said = capsys.readouterr().out
    assert "runs/masked and runs/causal at the same layer" in said and "masked tokens" in said
    details = json.loads(Path("out/probe.json").read_text())
    masked, causal, denoised = details["checkpoints"]
    assert [masked["predicts"], causal["predicts"], denoised["predicts"]] == ["masked", "next", None]
    for measured in details["checkpoints"]:
        assert measured["n"] == 400 and [row["layer"] for row in measured["layers"]] == [0, 1]
        embedding, last = (row["input"] for row in measured["layers"])
        # The embedding tells the token; what it tells of the predicted token comes later.
        assert embedding["shuffled_high"] < embedding["value"] <= measured["entropy"] + 1e-9
        assert last["low"] < last["value"] < last["high"]
        assert measured["layers"][0]["before"] is None and 0 < measured["layers"][1]["before"]["value"] <= 1
    assert [(pair["first"][5:], pair["second"][5:]) for pair in details["pairs"]] == [
        ("masked", "causal"), ("masked", "denoised"), ("causal", "denoised"),
    ]  # fmt: skip
    assert Path("out/probe.png").stat().st_size > 5000
    page = Path("out/probe.html").read_text()
    assert page.count("<svg") == 1 and page.count("<table") == 6
    # A checkpoint and itself are the same.
    assert (
        cli.main(
            ["probe", "checkpoint=[runs/causal,runs/causal]", *words, "clusters=15", "examples=400", "output=same"]
        )
        == 0
    )
    (pair,) = json.loads(Path("same/probe.json").read_text())["pairs"]
    capsys.readouterr()
    assert all(row["similarity"]["value"] == pytest.approx(1, abs=1e-6) for row in pair["layers"])
    for more, message in (
        (
            ["checkpoint=runs/causal", "examples=100", "clusters=9"],
            "examples=100 for classes = 20: fewer than 10 tokens",
        ),
        (["checkpoint=runs/causal", "examples=310", "clusters=15"], "for dimensions of runs/causal = 32"),
        (["checkpoint=[runs/causal,runs/other]", "examples=400", "clusters=15"], "have different tokenizers"),
        (["checkpoint=runs/causal", "examples=90000", "clusters=8000"], "the validation text has frequent tokens: "),
    ):
        assert cli.main(["probe", *words, *more, "output=no"]) == 2
        assert message in capsys.readouterr().err
