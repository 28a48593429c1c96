"""Texts and pairs that are read with their dependency trees: planted data, the paths of tokens, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtool.cli import main as cli
from lmtool.config.registry import build
from lmtool.data.examples import Rows, SplitData
from lmtool.data.trees import ANCESTORS
from lmtool.errors import UserError
from lmtool.nn.configs import TreeDepthPositionsConfig, TreeDistancePositionsConfig
from lmtool.nn.positions import tree_distances
from lmtool.session.labeled import predictions_of
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.sequence import MultiLabelConfig, RegressionConfig
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from tests.commands.conftest import TINY
from tests.nn.test_tree_positions import ENCODERS, SIZES, random_heads, searched_distances
from tests.objectives.objective_fixtures import tokenizer

COLUMNS = ["task.text=[first,second]", "task.heads=[first_heads,second_heads]"]


def shape(chance: random.Random, words: int = 6) -> tuple[list[int], str]:
    """The heads of a star or of a chain, whose words are in a random order."""
    order, kind = chance.sample(range(words), words), chance.choice(["star", "chain"])
    heads = [0] * words
    for number in range(1, words):
        heads[order[number]] = order[0 if kind == "star" else number - 1] + 1
    return heads, kind


def write(folder: Path, texts: int, train: int = 400, held_out: int = 150) -> None:
    """The class of a row is the shape of its last tree; the words, and the tree of the other text, are random. The rows
    of shuffled.jsonl have the trees of other rows."""
    chance = random.Random(0)
    folder.mkdir()
    for split, count in (("train", train), ("dev", held_out), ("shuffled", held_out)):
        rows = []
        for _ in range(count):
            row: dict[str, object] = {}
            for name in ("first", "second")[:texts]:
                heads, label = shape(chance)
                heads = shape(chance)[0] if split == "shuffled" else heads
                row |= {name: chance.choices(["red", "green", "blue"], k=6), f"{name}_heads": heads, "label": label}
            rows.append(json.dumps(row))
        (folder / f"{split}.jsonl").write_text("\n".join(rows))


def words_of(folder: str, kind: str, *more: str) -> list[str]:
    return [
        "finetune", "task=classification", f"task.path={folder}", *more, "model=bert_tiny", *TINY, "checkpoint=none",
        f"model/positions={kind}", "cache_dir=cache", "max_epochs=null",
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("kind", "texts", "steps"), [("tree_depth", 1, 60), ("tree_distance", 2, 160)])
def test_the_class_is_learned_from_trees_only(
    place: Path, kind: str, texts: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the trees of other rows, accuracy is that of a coin."""
    write(place / "planted", texts)
    columns = COLUMNS if texts == 2 else ["task.text=first", "task.heads=first_heads"]
    training = [f"max_steps={steps}", f"evaluate_every={steps}", "optimizer.lr=1e-2", "optimizer.weight_decay=0"]
    more = [*columns, "task.validation=[dev,shuffled]", "task.pooling=mean", *training, "name=x"]
    assert cli.main(words_of("planted", kind, *more)) == 0
    records = [json.loads(line) for line in Path("runs/x/predictions.jsonl").read_text().splitlines()]
    right = {split: [row["gold"] == row["prediction"] for row in records if row["split"] == split] for split in
             ("dev", "shuffled")}  # fmt: skip
    assert np.mean(right["dev"]) > 0.95 and abs(np.mean(right["shuffled"]) - 0.5) < 0.15
    if texts == 2:  # a line of predictions has the trees of its texts, so that it can be read again
        words = ["predict", "checkpoint=runs/x", "input=again.jsonl", "output=out.jsonl", "device=cpu"]
        rows = [{name: row[name] for name in row if name.startswith(("first", "second"))} for row in records]
        Path("again.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert cli.main(words) == 0
        again = [json.loads(line)["prediction"] for line in Path("out.jsonl").read_text().splitlines()]
        assert again == [row["prediction"] for row in records]
        learned = predictions_of(CONFIG.model_copy(update={"labels": ("chain", "star")}), "runs/x/predictions.jsonl")
        assert learned.parents.keys() == {"first", "second"}  # a student can learn them from the same trees
    capsys.readouterr()
    assert cli.main(["inspect", "positions", "kinds=[]", "checkpoint=[runs/x]", "device=cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 the cat 2" in out and ("edges to words 1 to 8" in out) == (kind == "tree_distance")
    assert "Its weights are trained." in Path("positions.html").read_text()
    texts_typed = ["text=red green", "pair=red blue"][:texts]
    assert cli.main(["predict", "checkpoint=runs/x", *texts_typed, "device=cpu"]) == 2
    assert "no column first_heads of heads" in capsys.readouterr().err


def test_domain_adaptation_reads_the_trees_of_both_domains(place: Path) -> None:
    write(place / "source", 2, 32, 10)
    write(place / "target", 2, 32, 10)
    more = [*COLUMNS, "task/domain=coral", "task.domain.target=target", "max_steps=1", "name=x"]
    assert cli.main(words_of("source", "tree_distance", *more)) == 0
    assert json.loads(Path("runs/x/result.json").read_text())["steps"] == 1


WORDS = ["the", "riverdogsat", "slowly", "two", "birds", "catbirds", "cross", "it"]


def pairs(count: int, seed: int = 0) -> dict[str, list[Any]]:
    """The columns of random pairs: one text is a list of words, the other one a text."""
    draws = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {"first": [], "second": [], "first_heads": [], "second_heads": []}
    for _ in range(count):
        for name in ("first", "second"):
            words = draws.choice(WORDS, draws.integers(1, 8)).tolist()
            heads = random_heads(len(words), draws)
            columns[name].append(words if name == "first" else "  ".join(words))
            columns[f"{name}_heads"].append(heads if name == "first" else " ".join(map(str, heads)))
    return columns


CONFIG = ClassificationConfig(text=("first", "second"), heads=("first_heads", "second_heads"), labels=("a", "b"))


def rows_of(columns: dict[str, list[Any]], config: Any = CONFIG) -> Rows:
    return build(config).rows(columns, [("file.jsonl", row) for row in range(1, len(columns["first"]) + 1)], False)


@pytest.mark.parametrize("format_name", ["bert", "roberta"])
@pytest.mark.parametrize("cut", [{}, {"max_length": 16}, {"max_length": 16, "stride": 2}])
def test_distances_of_tokens_are_those_of_their_words_within_each_text(format_name: str, cut: dict[str, int]) -> None:
    """Also in truncated pairs and in windows: special tokens have no word, and no path connects the two trees."""
    tokens, columns = tokenizer(), pairs(12)
    examples = SequenceExamples(
        rows_of(columns), InputFormat(tokens, format_name, **{"max_length": 64, **cut}), "x", "input"
    )
    plan = examples.plan(0)
    assert len(plan) > 12 if "stride" in cut else len(plan) == 12
    packed = examples.batch(plan.rows, np.arange(len(plan)), 0).inputs
    special = tokens.special_ids
    for record, start, length in zip(plan.rows, packed.starts, packed.lengths, strict=True):
        paths = packed.columns[ANCESTORS][start : start + length]
        is_text = np.array([int(token) not in special for token in packed.tokens[start : start + length]])
        assert ((paths >= 0).any(-1).numpy() == is_text).all()
        distances, real = tree_distances(paths[None][:, is_text], paths[None][:, is_text])
        sides, expected = [], []
        for name, retained, begin in (("first", "first", 0), ("second", "second", record["begin"])):
            words = columns[name][record["row"]]
            heads = columns[f"{name}_heads"][record["row"]]
            words, heads = (value.split() if isinstance(value, str) else value for value in (words, heads))
            ((_, word_T),) = tokens.encode_sentences([words])
            read_T = word_T[begin : begin + record[retained]]
            sides += [name] * len(read_T)
            expected.append(searched_distances([int(head) for head in heads])[read_T][:, read_T])
        same_text = np.array(sides)[:, None] == np.array(sides)
        assert (real[0].numpy() == same_text).all()
        assert distances[0].numpy()[same_text].tolist() == np.concatenate([part.ravel() for part in expected]).tolist()


@pytest.mark.parametrize("kind", [TreeDepthPositionsConfig(), TreeDistancePositionsConfig()])
@pytest.mark.parametrize("family", ENCODERS)
def test_every_encoder_reads_both_trees(family: str, kind: object) -> None:
    tokens = tokenizer()
    config, fields = ENCODERS[family]
    model = build(config(**{**SIZES, **fields, "vocab_size": tokens.vocab_size}, positions=kind), 0)
    task = CONFIG.model_copy(update={"pooling": "mean"})
    learner = build(task).learner(model, tokens, 0).eval()
    columns = pairs(4)
    for name in ("first", "second"):
        columns[name] = [WORDS] * 4
        columns[f"{name}_heads"] = [[0, *range(1, 8)]] * 4
    outputs = []
    for name, heads in (("first", None), ("first", [0, *[1] * 7]), ("second", [0, *[1] * 7])):
        changed = columns if heads is None else {**columns, f"{name}_heads": [heads] * 4}
        examples = learner.examples(SplitData("input", rows={task.name: rows_of(changed, task)}), 64)
        outputs.append(learner.outputs(examples.batch(examples.plan(0).rows, np.arange(4), 0), 0))
    assert all(not torch.allclose(outputs[0], other, atol=1e-5) for other in outputs[1:])


@pytest.mark.parametrize("config", [RegressionConfig, MultiLabelConfig])
def test_other_kinds_of_texts_read_trees(config: type[RegressionConfig]) -> None:
    rows = rows_of(pairs(3), config(text=CONFIG.text, heads=CONFIG.heads))
    assert rows.parents == rows_of(pairs(3)).parents and rows.take(np.array([2])).parents["first"] == [
        rows.parents["first"][2]
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"second_heads": [2, 3, 2]}, "file.jsonl:2: column second_heads: word 2 depends on itself"),
        ({"second_heads": [0, 0, 1]}, "file.jsonl:2: column second_heads: the sentence has 2 roots"),
        ({"second_heads": [0, 1, 4]}, "file.jsonl:2: column second_heads: the head of word 3 is 4, not a number from"),
        ({"second_heads": "0 1 _"}, "file.jsonl:2: column second_heads: the head of word 3 is _"),
        ({"second_heads": "0 1"}, "file.jsonl:2: column second_heads: 3 words and 2 heads"),
        ({"second_heads": None}, "file.jsonl:2: column second_heads: 3 words and 0 heads"),
        ({"second": ["a", 1, "c"]}, "file.jsonl:2: the column second holds int, not words"),
        ({"second": None}, "file.jsonl:2: the column second holds nothing, not a text"),
    ],
)
def test_rows_without_trees_are_refused_with_their_line(row: dict[str, object], problem: str) -> None:
    columns = pairs(1)
    for name, value in {"first": "a", "first_heads": "0", "second": "a b c", "second_heads": "2 0 2", **row}.items():
        columns[name].append(value)
    with pytest.raises(UserError) as refused:
        rows_of(columns)
    assert str(refused.value).startswith(problem) and "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"file.jsonl: no column second_heads of heads"):
        rows_of({name: values for name, values in pairs(1).items() if name != "second_heads"})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["task.text=[first,second]", "task.heads=head"], "needs one column of heads"),
        (["task.text=first", "task.heads=first"], "share a column"),
        (["task.text=first+second", "task.heads=head"], "joined texts have no dependency tree"),
        (["task.text=first", "task.heads=head", "task.head=prompt"], "task.heads=[head] applies to heads"),
        (["task.text=first", "task.heads=head", "model=gpt_tiny"], "model=gpt is not an encoder"),
        (["task.text=first", "task.heads=null"], "task=classification has none"),
        (["task.text=first", "task.heads=head", "model/positions=learned"], "read only by positions in a tree"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused_before_data_is_read(
    place: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {word.split("=")[0] for word in words}
    assert cli.main([word for word in words_of("missing", "tree_depth", "max_steps=1")
                     if word.split("=")[0] not in keys] + words) == 2  # fmt: skip
    assert problem in " ".join(capsys.readouterr().err.split())


def test_rows_with_and_without_trees_have_the_same_tokens_and_records() -> None:
    """A model with other positions is scored on the same rows, if its texts are texts."""
    columns = pairs(6)
    columns["first"] = [" ".join(words) for words in columns["first"]]
    plain, with_trees = rows_of(columns, CONFIG.model_copy(update={"heads": None})), rows_of(columns)
    assert plain.columns == with_trees.columns
    tokens = tokenizer()
    first, second = (
        SequenceExamples(replace(rows, labels=None), InputFormat(tokens, "bert", 64), "x", "input")
        for rows in (plain, with_trees)
    )
    batches = [examples.batch(examples.plan(0).rows, np.arange(6), 0).inputs for examples in (first, second)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
