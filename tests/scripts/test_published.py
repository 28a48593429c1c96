"""lmtool and the Trainer on published weights: both sides really run here, on a tiny folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmtool.config.tables import build
from tests.commands.conftest import write_rows
from tests.weights.published_folders import make


@pytest.fixture
def folder(tmp_path):
    """A tiny published folder, whose tokenizer tells the texts of a pair apart."""
    pytest.importorskip("accelerate")  # the Trainer wants it, nothing else does
    folder = tmp_path / "published"
    make("bert", folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.fixture
def words(tmp_path, folder):
    """What is typed: the folder, and where the rows go."""
    write_rows(tmp_path / "glue")
    return ["--checkpoint", str(folder), "--max-length", "32", "--output", str(tmp_path / "out")]


def run(script, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["published.py", *words])
    with pytest.raises(SystemExit) as ended:
        script("published").main()
    return ended.value.code


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_both_sides_run_once_on_the_same_rows(script, monkeypatch, capfd, words, tmp_path):
    words = [f"sst2={tmp_path / 'glue'}", *words, "--examples", "64", "--seeds", "1", "--most-times", "1"]
    assert run(script, monkeypatch, words) == 3  # two steps learn nothing
    printed = capfd.readouterr().out
    assert "train: 64 examples, the same" in printed and "dev: 40 examples, the same" in printed
    assert "(one seed)" in printed
    rows = lines(tmp_path / "out/rows.jsonl")
    assert [(row["task"], row["side"]) for row in rows] == [("sst2", "lmtool"), ("sst2", "Trainer")]
    assert [(row["steps"], row["scored"], row["metric"]) for row in rows] == [(2, 40, "accuracy")] * 2
    assert [row["informed"] for row in rows] == [False] * 2
    assert "after 2 steps Trainer (seed 1) predicts no better than a constant" in printed
    assert not (tmp_path / "out/sst2/times-1/lmtool-1/checkpoints").exists()
    # A finished run is not run again, and a table never mixes settings.
    assert run(script, monkeypatch, words) == 3
    assert len(lines(tmp_path / "out/rows.jsonl")) == 2
    assert run(script, monkeypatch, [*words, "--epochs", "3"]) == 2


def write_task(task, folder):
    """Local files of a task: pairs with values, tagged words of several pieces, questions about long contexts."""
    folder.mkdir()
    for split, count in (("train", 40), ("dev", 12)):
        if task == "stsb":
            rows = [("a b c d", f"e {row} f", str(row % 7 * 0.7)) for row in range(count)]
            texts = ["sentence1\tsentence2\tscore", *map("\t".join, rows)]
            (folder / f"{split}.tsv").write_text("\n".join(texts) + "\n")
        elif task == "wnut17":
            # A word that the tokenizer has nothing for is one of the words.
            sentence = ["the\tO", "fox{}\tB-person", "\ufe0f\tO", "unbelievably\tB-group", "sells\tI-group", ".\tO"]
            texts = ["\n".join(sentence).format(row) + "\n" for row in range(count)]
            (folder / f"{split}.conll").write_text("\n".join(texts), encoding="utf-8")
        else:
            more = "she sells sea shells by the sea shore , what a lovely film"
            texts = [f"the quick brown fox {row} jumps over the lazy dog ; {more} , {more}" for row in range(count)]
            answers = [{"text": [f"fox {row}"], "answer_start": [16]} for row in range(count)]
            rows = [{"question": "who jumps", "context": text, "answers": own} for text, own in zip(texts, answers)]  # noqa: B905
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def few_steps(script, monkeypatch):
    """Four steps, and windows that share less."""
    peers = script("peers_of_tasks")
    monkeypatch.setattr(script("same_batches"), "STEPS", 4)
    monkeypatch.setattr(script("published"), "STEPS", 4)
    monkeypatch.setattr(peers.QuestionPeer, "stride", 4)
    monkeypatch.setattr(peers.QuestionPeer, "words", ("task.stride=4", "batch_examples=8"))
    return peers


def test_steps_on_the_same_batches_are_the_same(script, monkeypatch, capsys, words, few_steps, tmp_path):
    tasks = []
    for task in ("stsb", "wnut17", "squad"):
        write_task(task, tmp_path / task)
        tasks.append(f"{task}={tmp_path / task}")
    words = [*tasks, *words, "--exact"]
    assert run(script, monkeypatch, words) == 0
    rows = lines(tmp_path / "out/exact/rows.jsonl")
    assert [(row["task"], row["steps"]) for row in rows] == [("stsb", 4), ("wnut17", 4), ("squad", 4)]
    assert all(row["last_loss"] != row["first_loss"] and row["logits"] and row["largest_logit"] > 1e-2 for row in rows)
    # The question is in several windows, some of which do not hold the answer.
    assert "train: 32 examples" in (printed := capsys.readouterr().out) and "train: 64 examples" in printed


def test_steps_that_differ_show(script, monkeypatch, words, few_steps, tmp_path):
    own = few_steps.SequencePeer.loss
    monkeypatch.setattr(few_steps.SequencePeer, "loss", lambda *given: 1.001 * own(*given))
    assert run(script, monkeypatch, [f"sst2={tmp_path / 'glue'}", *words, "--exact"]) == 3


def test_the_places_of_an_answer(script):
    places = script("peers_of_tasks").answer_places
    offsets, inside = [(0, 0), (0, 3), (0, 0), (4, 9), (10, 12), (12, 15), (0, 0)], [3, 4, 5]
    assert places(offsets, inside, 4, 9) == (3, 3)
    assert places(offsets, inside, 5, 13) == (3, 5)
    assert places(offsets, inside, 12, 15) == (5, 5)
    assert places(offsets, inside, 3, 9) == places(offsets, inside, 12, 16) == places(offsets, [], 0, 1) == (0, 0)


def test_pairs_are_the_same_input_on_both_sides(script, capsys, folder, tmp_path):
    """The Trainer gets everything that the tokenizer makes: the two segments, not the tokens alone."""
    from transformers import AutoTokenizer

    published, same_batches = script("published"), script("same_batches")
    write_task("stsb", tmp_path / "pairs")
    words = ["task=stsb", f"task.path={tmp_path / 'pairs'}", f"checkpoint={folder}", "max_length=32"]
    peer, data, learner = published.peer_of(words)
    same_batches.require_same_features(peer, data, learner)
    assert "train: 40 examples, the same" in capsys.readouterr().out
    row = peer.features(data.train)[1]
    assert row == {**AutoTokenizer.from_pretrained(folder)("a b c d", "e 1 f"), "labels": pytest.approx(0.7)}
    assert 1 in row["token_type_ids"]
    own = peer.features
    for name in ("token_type_ids", "labels"):

        def changed(rows, name=name):
            return [{**row, name: 0 if name == "labels" else [0] * len(row[name])} for row in own(rows)]

        peer.features = changed
        with pytest.raises(SystemExit):
            same_batches.require_same_features(peer, data, learner)
        assert f"of train have other {'targets' if name == 'labels' else name}" in capsys.readouterr().err


def test_both_sides_have_the_same_hyperparameters(script, words, folder, tmp_path):
    """The same parameters decay, and the rates are the same but for the Trainer's one step more at zero."""
    from transformers import AutoModelForSequenceClassification, Trainer

    published = script("published")
    peer, _, ours = published.peer_of(
        ["task=sst2", f"task.path={tmp_path / 'glue'}", f"checkpoint={folder}", "max_length=32", "optimizer.lr=0.001"]
    )
    config = peer.config
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    arguments = published.training_arguments(config, 640, 1, str(tmp_path))
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
    # The output layers: a normal cut at two deviations here, a whole one there.
    deviation = config.model.initializer_std
    assert deviation < ours.heads["sst2"].output.weight.abs().max() <= 2 * deviation
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2000).classifier.weight
    assert theirs.std().item() == pytest.approx(deviation, rel=0.02) and theirs.abs().max() > 3 * deviation


@pytest.mark.parametrize("gap, status", [(0.01, 0), (0.05, 3)])
def test_the_verdict(script, monkeypatch, capsys, words, tmp_path, gap, status):
    """Values of 0.88, 0.92, 0.88, 0.92 and such: each mean has a standard error of 0.0115, the difference one of
    0.0163 with six degrees of freedom, whose quantile is 2.447: 0.0400 to each side."""

    def one_side(shift):
        return lambda words, seed, output: {
            "metric": "accuracy", "value": 0.9 + shift + 0.02 * (-1) ** seed, "scored": 872, "steps": 4, "seconds": 2.0,
            "informed": True,
        }  # fmt: skip

    published = script("published")
    monkeypatch.setattr(published, "run_lmtool", one_side(gap))
    monkeypatch.setattr(published, "run_trainer", one_side(0.0))
    monkeypatch.setattr(published, "print_table", lambda output, columns, table, heading: print(table))
    monkeypatch.setattr(published, "require_same_features", lambda *given: None)
    assert run(script, monkeypatch, [f"sst2={tmp_path / 'glue'}", *words, "--seeds", "1,2,3,4"]) == status
    printed = capsys.readouterr().out
    assert (
        f"{gap:+.4f}" in printed
        and f"{gap - 0.03996:+.4f} to {gap + 0.03996:+.4f}" in printed
        and "(0.0115)" in printed
    )
    assert len(lines(tmp_path / "out/rows.jsonl")) == 8


@pytest.mark.parametrize(
    ("most", "status", "budgets"),
    [(8, 0, [(40, 1), *2 * [(80, 1)], *4 * [(96, 2)]]), (3, 3, [(40, 1), *4 * [(80, 1)]])],
)
def test_a_budget_at_which_a_side_has_learned_nothing_is_doubled(
    script, monkeypatch, capsys, words, tmp_path, most, status, budgets
):
    """In rows, and where there are no more in epochs. The first side predicts better than a constant from twice the
    budget on, the second one from four times; the table is of the last budget alone, and a command that is typed again
    runs nothing twice."""
    published, ran = script("published"), []

    def side(needed):
        def run(words, seed, output):
            keys = dict(word.split("=", 1) for word in words)
            rows, epochs = len(lines(Path(keys["task.path"], "train.jsonl"))), float(keys["max_epochs"])
            ran.append((rows, epochs))
            times = rows * epochs / 40
            return {
                "metric": "pearson", "value": times + 0.1 * seed, "scored": 9, "steps": 4, "seconds": 2.0,
                "informed": times >= needed,
            }  # fmt: skip

        return run

    monkeypatch.setattr(published, "run_lmtool", side(2))
    monkeypatch.setattr(published, "run_trainer", side(4))
    monkeypatch.setattr(published, "require_same_features", lambda *given: None)
    words = [f"sst2={tmp_path / 'glue'}", *words, "--examples", "40", "--seeds", "1,2", "--most-times", str(most)]
    assert run(script, monkeypatch, words) == status and ran == budgets
    printed = capsys.readouterr().out
    assert "sst2: after 4 steps lmtool (seed 1) predicts no better than a constant" in printed
    assert ("4.9500 (0.0500)" in printed) == (status == 0) and "1.1000" not in printed
    assert run(script, monkeypatch, words) == status and ran == budgets


@pytest.mark.parametrize(
    ("gold", "predicted", "informed"),
    [
        ([0.0, 1.0, 2.0, 3.0] * 9, [1.5, 1.6, 1.4, 1.5] * 9, False),  # a correlation of chance around the mean
        ([0.0, 1.0, 2.0, 3.0] * 9, [2.9, 3.1, 3.0, 3.2] * 9, False),  # one of .95, far from the mean
        ([0.0, 1.0, 2.0, 3.0] * 9, [0.6, 1.3, 1.8, 2.5] * 9, True),
        (["a", "a", "b"] * 9, ["a", "a", "a"] * 9, False),
        (["a", "a", "b"] * 9, ["a", "b", "b"] * 9, False),
        (["a", "a", "b"] * 9, ["a", "a", "b"] * 9, True),
        ([["O", "B"], ["O"]] * 9, [["O", "O"], ["O"]] * 9, False),
        ([["O", "B"], ["O"]] * 9, [["O", "B"], ["O"]] * 9, True),
        ([["fox", "a fox"], []] * 9, ["fox", "fox"] * 9, False),
        ([["fox", "a fox"], []] * 9, ["a fox", ""] * 9, True),
    ],
)
def test_what_is_better_than_a_constant(script, gold, predicted, informed):
    records = [{"gold": value, "prediction": other} for value, other in zip(gold, predicted, strict=True)]
    assert script("published").informed(records) is informed


@pytest.mark.parametrize("theirs, agree", [(0.0, True), (0.25, False)])
def test_seeds_that_all_score_the_same(script, capsys, tmp_path, theirs, agree):
    rows = script("rows").Rows(tmp_path, ("task", "side", "seed"), {})
    for seed in (1, 2):
        for side, value in (("lmtool", 0.0), ("Trainer", theirs)):
            row = {"task": "cola", "times": 1, "side": side, "seed": seed, "metric": "matthews", "value": value}
            rows.add({**row, "scored": 8, "steps": 4, "seconds": 2.0, "informed": True})
    assert script("published").show(rows) is agree
    assert "not known" in capsys.readouterr().out
