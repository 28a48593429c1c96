"""Taggers that read dependency trees: planted data, subwords, resume, and what is refused before data is read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from lmtool.cli import main as cli
from lmtool.data.trees import ANCESTORS
from tests.commands.conftest import KEEP, TINY
from tests.distillation.runs import STEPS, assert_same, interrupt, saved

WORDS = {"red": "A", "green": "A", "blue": "B", "gray": "B", "unquestionably": "C", "seven": "C"}


def sentence(chance: random.Random, shuffled: bool) -> str:
    """A star in CoNLL-U: all words depend on one, whose class is the tag of all words. shuffled: the heads name another
    word, so that they say nothing about the tag."""
    words = chance.choices(list(WORDS), k=7)
    root = chance.randrange(7)
    tag = WORDS[words[root]]
    shown = chance.randrange(7) if shuffled else root
    lines = []
    for number, word in enumerate(words):
        head = 0 if number == shown else shown + 1
        lines.append("\t".join([str(number + 1), word, "_", tag, "_", "_", str(head), "dep", "_", "_"]))
    return "\n".join(lines) + "\n\n"


def write(folder: Path, train: int = 600, held_out: int = 100) -> None:
    chance = random.Random(0)
    folder.mkdir()
    for split, count in (("train", train), ("dev", held_out), ("shuffled", held_out)):
        (folder / f"{split}.conllu").write_text("".join(sentence(chance, split == "shuffled") for _ in range(count)))


def words_of(folder: str, kind: str = "tree_distance", *more: str) -> list[str]:
    return [
        "finetune", "task=pos", f"task.path={folder}", "task.heads=head", "model=bert_tiny", *TINY, "checkpoint=none",
        f"model/positions={kind}", "cache_dir=cache", "max_epochs=null", KEEP, *more,
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("kind", "steps"), [("tree_depth", 60), ("tree_distance", 120)])
def test_tagger_learns_a_function_of_the_head_from_trees_only(place: Path, kind: str, steps: int) -> None:
    """With the heads of another word, the same model is no better than guesses from the words of the sentence."""
    write(place / "planted")
    more = [f"max_steps={steps}", f"evaluate_every={steps}", "batch_examples=32", "optimizer.lr=1e-2", "name=x"]
    more += ["task.validation=[dev,shuffled]", "optimizer.weight_decay=0"]
    assert cli.main(words_of("planted", kind, *more)) == 0
    right: dict[str, list[bool]] = {"dev": [], "shuffled": []}  # words of sentences that were not trained on
    for line in Path("runs/x/predictions.jsonl").read_text().splitlines():
        row = json.loads(line)
        right[row["split"]] += [tag == gold for tag, gold in zip(row["prediction"], row["gold"], strict=True)]
    assert np.mean(right["dev"]) > 0.9 and np.mean(right["shuffled"]) < 0.5


def test_subwords_share_the_path_of_their_word_and_special_tokens_have_none(place: Path) -> None:
    from lmtool.data.examples import Rows
    from lmtool.tasks.kinds.texts import InputFormat
    from lmtool.tasks.kinds.tokens import TaggedWindows
    from tests.objectives.objective_fixtures import tokenizer

    tokens = tokenizer()
    sentences = [["the", "riverdogsat", "slowly"], ["two", "birds", "catbirds", "cross", "it"]]
    parents = [[1, -1, 1], [1, 3, 1, -1, 3]]
    rows = Rows([0, 1], {"tokens": sentences}, None, [("x", 1), ("x", 5)], {"tokens": parents})
    examples = TaggedWindows(rows, InputFormat(tokens, "bert", 32), "pos", "input")
    packed = examples.batch(examples.plan(0).rows, np.arange(2), 0).inputs
    for number, (start, length) in enumerate(zip(packed.starts, packed.lengths, strict=True)):
        paths = packed.columns[ANCESTORS][start : start + length]
        assert (paths[[0, -1]] == -1).all()
        ((_, word_T),) = tokens.encode_sentences([sentences[number]])
        assert len(word_T) > len(sentences[number])
        for path, word in zip(paths[1:-1].tolist(), word_T.tolist(), strict=True):
            wanted = [word]
            while parents[number][wanted[0]] >= 0:
                wanted.insert(0, parents[number][wanted[0]])
            assert path == wanted + [-1] * (len(path) - len(wanted))


@pytest.mark.parametrize("kind", ["tree_depth", "tree_distance"])
def test_resume_is_bitwise_and_predictions_read_trees(
    place: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place / "trees", 32, 10)

    def start(name: str, status: int = 0) -> Path:
        words = words_of("trees", kind, *STEPS, "batch_examples=8", "model.dropout=0.1", f"name={name}")
        assert cli.main(words) == status
        return Path("runs") / name

    whole = start("whole")
    interrupt(monkeypatch, lambda status: start("cut", status))
    assert_same(saved(whole), saved(start("cut")))
    assert (
        cli.main(["predict", "checkpoint=runs/whole", "input=trees/dev.conllu", "output=out.jsonl", "device=cpu"]) == 0
    )
    assert len(Path("out.jsonl").read_text().splitlines()) == 10
    assert cli.main(["evaluate", "checkpoint=runs/whole", "device=cpu", "cache_dir=cache"]) == 0
    capsys.readouterr()
    assert cli.main(["predict", "checkpoint=runs/whole", "text=red green", "device=cpu"]) == 2
    assert "no column head of heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "line", "problem"),
    [
        (["2", "1", "0"], 1, "word 1 depends on itself"),
        (["0", "0", "1"], 2, "the sentence has 2 roots"),
        (["0", "4", "1"], 2, "the head of word 2 is 4, not a number from 0 to 3"),
        (["0", "1", "_"], 3, "the head of word 3 is _"),
    ],
)
def test_heads_that_are_no_tree_are_refused_with_their_line(
    place: Path, heads: list[str], line: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place / "trees", 3, 3)
    bad = "".join(f"{n}\tred\t_\tA\t_\t_\t{head}\tdep\t_\t_\n" for n, head in enumerate(heads, 1))
    train = place / "trees" / "train.conllu"
    train.write_text(f"{bad}\n{train.read_text()}")
    assert cli.main(words_of("trees", "tree_depth", "max_steps=1", "name=x")) == 2
    assert f"train.conllu:{line}: column head: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model=gpt_tiny"], "model=gpt is not an encoder"),
        (["task.heads=null"], "task=pos has none"),
        (["tuning=prefix"], "which have no place in the trees"),
        (["model/positions=learned"], "task.heads is read only by positions in a tree"),
        (["task.heads=null", "task=sst2"], "task=sst2 has none"),
    ],
)
def test_what_has_no_tree_is_refused_before_data_is_read(
    place: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [word for word in words_of("missing", "tree_depth", "max_steps=1") if word.split("=")[0] not in
               {other.split("=")[0] for other in words}]  # fmt: skip
    if "task=sst2" in words:
        words = ["task=sst2"]
    assert cli.main([*command, *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_pretraining_on_text_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "model=bert_tiny", "model/positions=tree_distance", "data=text", "data.path=missing.txt"]
    assert cli.main(words) == 2
    assert "text to pretrain on has none" in capsys.readouterr().err
