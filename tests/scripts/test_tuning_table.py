"""The table of tuning methods: the search of rates, the rows that are drawn, and LoRA's two sides on a tiny folder."""

from __future__ import annotations

import json
import sys

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import skip_reports, write_rows
from tests.weights.published_folders import make


@pytest.fixture
def table(script, monkeypatch, tmp_path):
    """The script, whose runs of lmtool stay in this process, and a tiny published folder."""
    monkeypatch.chdir(tmp_path)
    skip_reports(monkeypatch)
    write_rows(tmp_path / "glue")
    make("bert", tmp_path / "published")
    module = script("tuning_table")

    def finetuned(words, seed, folder):
        assert cli.main(["finetune", *words, f"seed={seed}", f"run_dir={folder}"]) == 0
        return json.loads((folder / "result.json").read_text())

    monkeypatch.setattr(module, "finetuned", finetuned)
    return module


def run(table, monkeypatch, *words):
    """The exit status of the script."""
    common = ["--checkpoint", "published", "--examples", "16", "--choose", "8", "--max-length", "32", "--output", "out"]
    monkeypatch.setattr(sys, "argv", ["tuning_table.py", *common, "--set", "device=cpu", *words])
    try:
        table.main()
    except SystemExit as ended:
        return ended.code
    return 0


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_search_ends_between_worse_neighbours(table):
    scores = {-3: 0, -2: 1, -1: 3, 0: 2, 1: 1, 2: 4, 3: 0}

    def tried(most, scores=scores):
        powers = [0]
        while (power := table.next_power({power: scores[power] for power in powers}, most)) is not None:
            powers.append(power)
        return powers

    assert tried(9) == [0, 1, -1, -2] and tried(3) == [0, 1, -1] and tried(1) == [0]
    assert tried(9, {-1: 0, 0: 1, 1: 2, 2: 3, 3: 1}) == [0, 1, 2, 3]


def test_finished_runs_stay_and_what_is_scored_chooses_nothing(table, monkeypatch, capfd, tmp_path):
    sides = {"lora_pooler": 0.5, "peft_lora": 0.75}

    def side(words, seed, folder, edit=None):
        assert "task.validation=[test]" in words and "task.validation=[dev]" not in words
        return {"metric": "accuracy", "value": sides[folder.name] + 0.01 * seed, "scored": 40, "steps": 2, "seconds": 1}

    monkeypatch.setattr(table, "run_lmtool", side)
    monkeypatch.setattr(table, "run_trainer", side)
    words = ["sst2=glue", "--methods", "lora,bitfit", "--main", "lora", "--seeds", "1,2", "--most", "2"]
    assert run(table, monkeypatch, *words) == 0
    printed = capfd.readouterr().out
    text = (tmp_path / "out/rows.jsonl").read_text()
    rows = rows_of(tmp_path / "out/rows.jsonl")
    searched = {name: [row for row in rows if (row["method"], row["seed"]) == (name, 1)] for name in ("lora", "bitfit")}
    assert [row["rate"] for row in searched["lora"]] == [4e-4, 1.6e-3]
    assert [row["rate"] for row in searched["bitfit"]] == [1e-3, 4e-3]
    best = max(searched["lora"], key=lambda row: (row["chosen_by"], -row["chosen_by_loss"]))["rate"]
    others = [row for row in rows if row["seed"] == 2 and row["method"] != "bitfit"]
    assert [(row["method"], row["rate"]) for row in others] == [("lora", best), *((name, best) for name in sides)]
    assert {(row["scored"], row["steps"]) for row in rows} == {(40, 2)}
    assert all(0 < row["saved_bytes"] < 30_000 for row in rows if row["method"] not in sides), "the delta alone"
    assert "sst2: 2 steps of 8, 40 rows scored" in printed
    assert "difference -0.2500, its standard error 0.0071" in printed
    drawn = {split: rows_of(tmp_path / f"out/sst2/rows/{split}.jsonl") for split in ("train", "dev", "test")}
    assert {split: len(own) for split, own in drawn.items()} == {"train": 16, "dev": 8, "test": 40}
    lines = (tmp_path / "glue/dev.tsv").read_text().splitlines()[1:]
    assert [row["sentence"] for row in drawn["test"]] == [line.split("\t")[0] for line in lines]
    assert run(table, monkeypatch, *words) == 0
    assert (tmp_path / "out/rows.jsonl").read_text() == text


def test_classes_are_the_first_by_name(table, monkeypatch, tmp_path):
    (tmp_path / "bank").mkdir()
    for split, count in (("train", 60), ("test", 20)):
        lines = [f"what about {number},{'cdab'[number % 4]}" for number in range(count)]
        (tmp_path / f"bank/{split}.csv").write_text("\n".join(["text,category", *lines]) + "\n")
    words = ["banking77=bank", "--classes", "2", "--methods", "bitfit", "--most", "1"]
    assert run(table, monkeypatch, *words, "--set", "task.metrics=[accuracy]") == 0
    for split in ("train", "dev", "test"):
        assert {row["label"] for row in rows_of(tmp_path / f"out/banking77/rows/{split}.jsonl")} == {"a", "b"}


@pytest.mark.slow
def test_lora_learns_what_pefts_learns(table, script, monkeypatch):
    """The same losses and logits on the same batches without dropout, from the same A; and the Trainer takes it."""
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    published, same_batches = script("published"), script("same_batches")
    words = ["task=sst2", "task.path=glue", "checkpoint=published", "tuning=lora", "task.pooling=first", "device=cpu"]
    words += ["max_epochs=1", "max_length=32", "batch_examples=8", "optimizer.lr=0.01"]
    peer, data, learner = published.peer_of(words)
    ours = dict(learner.named_parameters())

    class Tuned(table.SequencePeer):
        def model(self):
            model = table.with_peft(super().model(), self.config)
            theirs = {name: tensor for name, tensor in model.named_parameters() if "lora_A" in name}
            for layer in range(2):
                for own, name in (("q_proj", "query"), ("v_proj", "value")):
                    (tensor,) = [theirs.pop(key) for key in list(theirs) if f"layer.{layer}." in key and name in key]
                    tensor.data.copy_(ours[f"backbone.layers.{layer}.self_attn.{own}.lora_a"])
            assert not theirs
            return model

    monkeypatch.setattr(same_batches, "STEPS", 6)
    compared = same_batches.compare_steps(Tuned(peer.config), data, learner)
    assert compared["steps"] == 6 and max(compared["loss_difference"], compared["logit_difference"]) < 1e-5
    assert any(tensor.abs().max() > 1e-3 for name, tensor in ours.items() if name.endswith("lora_b")), "it learned"
    scores = published.train_with_trainer(words, 1, table.with_peft)
    assert (scores["steps"], scores["scored"]) == (12, 40)


def test_what_it_refuses(table, monkeypatch, capsys):
    assert run(table, monkeypatch, "sst2=glue", "--methods", "lora,best") == 2
    assert "best is no method of the table" in capsys.readouterr().err
    assert run(table, monkeypatch, "sst2=glue", "--choose", "96") == 2
    assert "sst2 has 96 training rows, and --choose takes 96" in capsys.readouterr().err
    assert run(table, monkeypatch, "stsb=glue", "--output", "other") == 2
    assert "stsb is of the kind regression" in capsys.readouterr().err
