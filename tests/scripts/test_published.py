"""lmtool and the Trainer on published weights: both sides really run here, on a tiny folder."""

from __future__ import annotations

import json
import math
import sys

import pytest

from lmtool.config.tables import build
from lmtool.tasks.configs import ClassificationConfig
from tests.commands.conftest import write_rows
from tests.weights.published_folders import make


@pytest.fixture
def words(tmp_path):
    """What is typed: a tiny published folder, and labelled rows."""
    pytest.importorskip("accelerate")  # the Trainer wants it, nothing else does
    make("bert", tmp_path / "published")
    write_rows(tmp_path / "glue")
    return [
        "--path", str(tmp_path / "glue"), "--checkpoint", str(tmp_path / "published"), "--examples", "64",
        "--max-length", "32", "--output", str(tmp_path / "out"), "--seeds",
    ]  # fmt: skip


def run(script, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["published.py", *words])
    with pytest.raises(SystemExit) as ended:
        script("published").main()
    return ended.value.code


def test_both_sides_run_once_on_the_same_rows(script, monkeypatch, capfd, words, tmp_path):
    assert run(script, monkeypatch, [*words, "1"]) == 0
    printed = capfd.readouterr().out
    assert "train: 64 rows, the same" in printed and "dev: 40 rows, the same" in printed
    assert "one seed has no standard error" in printed
    rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert [row["side"] for row in rows] == ["lmtool", "Trainer"]
    assert [(row["steps"], row["scored"]) for row in rows] == [(4, 40)] * 2
    # A finished run is not run again, and a table never mixes settings.
    assert run(script, monkeypatch, [*words, "1"]) == 0
    assert len((tmp_path / "out/rows.jsonl").read_text().splitlines()) == 2
    assert run(script, monkeypatch, [*words, "1", "--epochs", "3"]) == 2


def write_pairs(folder):
    """Pairs by the columns of RTE."""
    folder.mkdir()
    for split, count in (("train", 64), ("dev", 40)):
        rows = [("a b c d", f"e {row} f" if row % 2 else "a b c d", row % 2) for row in range(count)]
        lines = ["sentence1\tsentence2\tlabel", *("\t".join(map(str, row)) for row in rows)]
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")


def test_pairs_are_the_same_input_on_both_sides(script, capsys, tmp_path):
    """The Trainer gets everything that the tokenizer makes: the two segments, not the tokens alone."""
    from transformers import AutoTokenizer

    published, folder = script("published"), str(tmp_path / "published")
    make("bert", tmp_path / "published")
    write_pairs(tmp_path / "pairs")
    config = published.decoded(["task=rte", f"task.path={tmp_path / 'pairs'}", f"checkpoint={folder}", "max_length=32"])
    with pytest.raises(SystemExit):
        published.require_same_tokens(folder, config)
    assert "64 rows of train have other token_type_ids" in capsys.readouterr().err
    settings = tmp_path / "published/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "BertTokenizer"}))
    published.require_same_tokens(folder, config)
    assert "train: 64 rows, the same" in capsys.readouterr().out
    row = published.features(folder, config, published.labelled(config).train)[1]
    assert row == {**AutoTokenizer.from_pretrained(folder)("a b c d", "e 1 f"), "labels": 1}
    assert 1 in row["token_type_ids"]


def test_both_sides_have_the_same_hyperparameters(script, words, tmp_path):
    """The same parameters decay, and the rates are the same but for the Trainer's one step more at zero."""
    from transformers import AutoModelForSequenceClassification, Trainer

    published = script("published")
    config = published.decoded(
        ["task=sst2", f"task.path={words[1]}", f"checkpoint={words[3]}", "max_length=32", "optimizer.lr=0.001"]
    )
    ours = build(ClassificationConfig(name="sst2", labels=("0", "1")), build(config.model, 1), None, 1)
    theirs = AutoModelForSequenceClassification.from_pretrained(words[3], num_labels=2)
    arguments = published.arguments(config, 640, 1, str(tmp_path))
    trainer = Trainer(theirs, arguments)
    trainer.create_optimizer_and_scheduler(60)
    sizes = [
        sorted(
            (sum(tensor.numel() for tensor in group["params"]), group["weight_decay"])
            for group in optimizer.param_groups
        )
        for optimizer in (trainer.optimizer, build(config.optimizer, ours.parameter_groups()))
    ]
    assert sizes[0] == sizes[1] and [decay for _, decay in sizes[0]] == [0.0, 0.01]
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == (config.optimizer.betas, config.optimizer.epsilon)
    schedule, theirs_at = build(config.schedule), trainer.lr_scheduler.lr_lambdas[0]
    rates = [schedule(step, 60) for step in range(1, 61)]
    assert [theirs_at(step) for step in range(6)] == pytest.approx([0.0, *rates[:5]])
    assert [theirs_at(step) for step in range(6, 60)] == pytest.approx(rates[6:])
    assert arguments.max_grad_norm == config.optimizer.clip_norm
    deviations = [head.weight.std().item() for head in (ours.heads["sst2"].output, theirs.classifier)]
    assert all(deviation == pytest.approx(config.model.initializer_std, rel=0.3) for deviation in deviations)


@pytest.mark.parametrize("gap, status, word", [(0.01, 0, "within"), (0.05, 3, "beyond")])
def test_the_verdict(script, monkeypatch, capsys, words, tmp_path, gap, status, word):
    """Standard deviations of 0.02 over four seeds: the difference has an error of 0.0141."""
    out = tmp_path / "out"
    deviations = [-1.0, 1.0, -1.0, 1.0]
    spread = 0.02 * math.sqrt(3) / 2
    published = script("published")

    def one_side(shift):
        return lambda words, checkpoint, seed, output: {
            "metric": "accuracy", "value": 0.9 + shift + spread * deviations[seed - 1], "scored": 872, "steps": 4,
            "seconds": 2.0,
        }  # fmt: skip

    monkeypatch.setattr(published, "run_lmtool", one_side(gap))
    monkeypatch.setattr(published, "run_trainer", one_side(0.0))
    assert run(script, monkeypatch, [*words, "1,2,3,4"]) == status
    printed = capsys.readouterr().out
    assert f"{word} two standard errors" in printed and "0.0141" in printed and f"{gap:+.4f}" in printed
    assert "64.0" in printed  # 64 rows, two epochs, in two seconds
    assert len((out / "rows.jsonl").read_text().splitlines()) == 8
