"""Token classification: shipped tasks train, every word is predicted once, losses and scores match references."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from task_fixtures import CONF, backbone, evaluation, examples_of, split_data, task_config, task_data, tokenizer
from token_fixtures import conll, tagged, tagged_folder

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.tokens import WORD
from lmtool.tasks.loading import load_task

TASKS = sorted(
    path.stem for path in CONF.glob("*.yaml")
    if task_data(path.stem)["kind"] == "token_classification"
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers():
    return {"bert": tokenizer(), "gpt": tokenizer("bytebpe")}


def load(folder, name="ner", **overrides):
    return load_task(task_config(name, path=folder, **overrides), 0, folder / "cache", True)


def learner_of(data, tokenizers, family="bert", **fields):
    return data.config.learner(backbone(family, **fields), tokenizers[family], 0)


def batch_of(examples, numbers):
    numbers = np.asarray(numbers)
    return examples.batch(examples.plan(0).rows[numbers], numbers, 0)


def test_shipped_tagging_tasks_are_tested():
    assert {"ner", "pos", "chunking", "conll2003", "wnut17", "ud_ewt", "bc5cdr", "conll2000"} < set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_shipped_tasks_train_on_source_layout(name, tokenizers, tmp_path):
    data = load(tagged_folder(name, tmp_path), name)
    held_out = name in ("conll2000", "chunking")
    assert len(data.train) == (11 if held_out else 13 if name == "wnut17" else 12)
    assert len(data.test["test"]) == (4 if name == "wnut17" else 3) and data.test["test"].labels is not None
    family = "gpt" if name in ("pos", "ner") else "bert"
    learner = learner_of(data, tokenizers, family).train()
    examples = examples_of(learner, data.train, 32, "train")
    batch = batch_of(examples, range(4))
    loss = learner(batch, 1).sums[name] / learner.counts(batch)[name]
    loss.backward()
    assert torch.isfinite(loss) and learner.heads[name].output.weight.grad.abs().sum() > 0
    split = data.validation["dev"]
    scores = evaluation(learner, split)
    assert scores.metrics().keys() == {"loss", *data.config.metrics}
    train = split_data(learner, data.train)
    baseline = learner.baseline(train, split_data(learner, split, "dev"), [], learner.predictors(train, examples))
    assert baseline["metric"] == data.config.metric and isinstance(baseline["prediction"], str)
    row = next(scores.records())
    assert row["tokens"] == split.columns["tokens"][0] and len(row["prediction"]) == len(row["gold"]) == len(
        row["tokens"]
    )
    assert json.dumps(row) and data.metadata["words"] > 40


@pytest.mark.parametrize("layout", ["iob1", "iobes", "jsonl", "csv", "numbers"])
def test_schemes_and_layouts_give_same_data(layout, tmp_path):
    """iob1, iobes, jsonl, csv and class numbers decode to the same rows as BIO in CoNLL columns."""
    sentences = tagged(8)
    plain, other = tmp_path / "plain", tmp_path / "other"
    for folder in (plain, other):
        folder.mkdir()
        conll(folder / "dev.conll", sentences)
    conll(plain / "train.conll", sentences)
    expected, more = load(plain), {}
    if layout in ("iob1", "iobes"):
        (other / "dev.conll").unlink()
        rewritten = [(words, _in_scheme(tags, layout)) for words, tags in sentences]
        for split in ("train", "dev"):
            conll(other / f"{split}.conll", rewritten)
    elif layout == "csv":
        lines = [f"{' '.join(words)};{' '.join(tags)}" for words, tags in sentences]
        (other / "train.csv").write_text("\n".join(["tokens;tags", *lines]))
    else:
        more = {"labels": list(expected.config.labels)} if layout == "numbers" else {}
        number = {label: index for index, label in enumerate(expected.config.labels)}
        rows = [
            {"tokens": words, "ner_tags": [number[tag] for tag in tags] if more else tags} for words, tags in sentences
        ]
        (other / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load(other, **more)
    assert data.config.labels == expected.config.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert data.train.labels == expected.train.labels and data.train.columns == expected.train.columns
    assert data.metadata["entities"] == {"LOC": 8, "PER": 12}


def _in_scheme(tags, scheme):
    """BIO tags as iob1 or iobes."""
    written = []
    for place, tag in enumerate(tags):
        before, after = ("O", *tags)[place], (*tags, "O")[place + 1]
        if tag[0] == "B" and scheme == "iob1":
            tag = tag if before[2:] == tag[2:] else "I" + tag[1:]
        elif tag != "O" and scheme == "iobes" and after != "I" + tag[1:]:
            tag = {"B": "S", "I": "E"}[tag[0]] + tag[1:]
        written.append(tag)
    return written


def test_windows_predict_every_word_once(tokenizers, tmp_path):
    """In a sentence longer than the model, each word is predicted by one window, as the model predicts it from that
    window's tokens alone."""
    conll(tmp_path / "train.conll", [(["film", "story"] * 40, ["B-X", "O"] * 40), (["end"], ["O"])])
    conll(tmp_path / "dev.conll", [(["film", "story"] * 40, ["B-X", "O"] * 40)])
    data = load(tmp_path, stride=6)
    learner = learner_of(data, tokenizers).eval()
    examples = examples_of(learner, data.validation["dev"], 24, "dev")
    count = len(examples.plan(0))
    assert count > 3 and examples.metadata()["sentences_in_windows"] == 1
    together = batch_of(examples, range(count))
    word_M = together.inputs.columns[WORD][together.targets["ner"].at]
    assert word_M.tolist() == list(range(80))
    with torch.no_grad():
        batches = [batch_of(examples, [number]) for number in range(count)]
        alone = [learner.parts(learner.outputs(batch, 0), batch)[0] for batch in batches]
        packed = learner.parts(learner.outputs(together, 0), together)
    for single, other in zip(alone, packed, strict=True):
        assert single[0].tolist() == other[0].tolist() and single[1].tolist() == other[1].tolist()
        np.testing.assert_allclose(single[2], other[2], atol=1e-5)
    (prediction,) = evaluation(learner, data.validation["dev"], max_length=24).predictions
    assert prediction.value == [tag for part in alone for tag in part[1]]
    with pytest.raises(RuntimeError, match="each must be predicted once"):
        learner.kind.join([alone[1], alone[0]])


@pytest.mark.parametrize("train_on", ["all", "first"])
def test_loss_over_word_pieces_matches_torch(train_on, tokenizers, tmp_path):
    long = "filmstorymesswaste"  # several pieces
    conll(tmp_path / "train.conll", [([long, "film", long], ["B-X", "O", "I-X"]), (["film"], ["O"])])
    conll(tmp_path / "dev.conll", [([long], ["B-X"])])
    data = load(tmp_path, train_on=train_on, loss__label_smoothing=0.1, loss__class_weights=[1.0, 2.0, 3.0])
    learner = learner_of(data, tokenizers).eval()
    batch = batch_of(examples_of(learner, data.train, 64, "train"), [0])
    pieces = len(tokenizers["bert"].encode(long))
    assert pieces > 1
    expected = [1, *[2] * (pieces - 1), 0, 2, *[2] * (pieces - 1)] if train_on == "all" else [1, 0, 2]
    target = batch.targets["ner"]
    assert data.config.labels == ("O", "B-X", "I-X") and target.labels.tolist() == expected
    logits = learner.heads["ner"].output(learner.backbone(batch.inputs))[target.at]
    torch.testing.assert_close(learner.outputs(batch, 0), logits)
    ours = learner(batch, 1).sums["ner"] / learner.counts(batch)["ner"]
    weights = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(ours, F.cross_entropy(logits, target.labels, weights, label_smoothing=0.1))
    # Evaluation uses only first pieces.
    dev = batch_of(examples_of(learner, data.validation["dev"], 64, "dev"), [0])
    assert dev.targets["ner"].labels.tolist() == [1]


@pytest.mark.parametrize(("config", "side"), [(BartConfig, "decoder"), (T5Config, "encoder")])
def test_encoder_decoders_tag_words(config, side, tokenizers, tmp_path):
    data = load(tagged_folder("ner", tmp_path))
    sizes = {"vocab_size": 300, "num_layers": 1, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48,
             "max_positions": 64, "dropout": 0.0}  # fmt: skip
    sizes |= {"head_size": 16} if config is T5Config else {}
    words = build(_sentencepiece(), ["a fine and warm film of a story"] * 30, 290) if config is T5Config else None
    tokens = words or build(_bytebpe(), ["a fine and warm film of a story"] * 30, 290)
    learner = data.config.learner(build(config(**sizes), 0), tokens, 0).train()
    batch = batch_of(examples_of(learner, data.train, 32, "train"), range(3))
    assert (batch.outputs is None) == (side == "encoder")
    learner(batch, 1).sums["ner"].backward()
    reached = {name.split(".")[1] for name, tensor in learner.named_parameters() if tensor.grad is not None}
    assert ("decoder" in reached) == (side == "decoder") and "encoder" in reached
    assert evaluation(learner, data.validation["dev"]).metrics()["loss"] > 0


def _bytebpe():
    from lmtool.tokenizers.configs import ByteBpeConfig

    return ByteBpeConfig(minimum_count=1, special_tokens="roberta")


def _sentencepiece():
    from lmtool.tokenizers.configs import SentencePieceConfig

    return SentencePieceConfig()


def test_words_without_pieces_are_predicted(tokenizers, tmp_path):
    conll(tmp_path / "train.conll", tagged(6))
    rows = [{"tokens": ["\u200d", "film", "\u200d"], "tags": ["O", "B-PER", "O"]}, {"tokens": [], "tags": []}]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load(tmp_path)
    for family in tokenizers:
        learner = learner_of(data, tokenizers, family)
        result = evaluation(learner, data.validation["dev"])
        assert [len(prediction.value) for prediction in result.predictions] == [3, 0]
        assert [record["tokens"] for record in result.records()] == [row["tokens"] for row in rows]
    metadata = examples_of(learner_of(data, tokenizers), data.validation["dev"], 32, "dev").metadata()
    assert metadata["words_without_pieces"] == 2
    (tmp_path / "train.jsonl").write_text((tmp_path / "dev.jsonl").read_text() * 1 + "\n" + json.dumps(rows[1]))
    (tmp_path / "train.conll").unlink()
    assert load(tmp_path).metadata["warnings"] == ["2 training sentences without words: not used"]


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        (
            "a\tB-X\nb\tO\n",
            "a\tO\n\nb\tO\nc\tB-Y\n",
            r"dev.conll:4: label 'B-Y' is unknown; .* ner are O, B-X",
        ),
        ("a\tB-X\nb\tO\n", "a\tO\nb\tE-X\n", r"dev.conll:2: the tag 'E-X' is not possible in task.scheme=bio"),
        ("a\tB-X\nb\tO\n", "a\tO\nb\t\n", r"dev.conll:2: the tag is missing in task.scheme=bio"),
        ("a\tNOUN\nb\tVERB\n", "a\tNOUN\n", r"the tags in the column tags mark no entities: NOUN, VERB"),
        ("a\tO\nb\tO\n", "a\tO\n", r"the tags in the column tags mark no entities"),
        ("a\nb\n", "a\tO\n", r"train.conll: no column tags to predict; there are tokens"),
    ],
)
def test_tag_errors_name_file_and_line(train, dev, message, tmp_path):
    (tmp_path / "train.conll").write_text(train)
    (tmp_path / "dev.conll").write_text(dev)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert caught.value.hint


def test_mismatched_words_and_tags_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"tokens": ["a"], "tags": ["B-X"]}\n{"tokens": ["a", "b"], "tags": ["O"]}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: 2 words and 1 tag"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"tokens": ["a", 3], "tags": ["B-X", "O"]}\n')
    with pytest.raises(UserError, match=r"train.jsonl:1: the column tokens holds int, not words"):
        load(tmp_path)


def test_entities_starting_with_i_are_counted(tokenizers, tmp_path):
    conll(tmp_path / "train.conll", [(["a", "b", "c"], ["B-X", "O", "I-X"]), (["d"], ["O"])])
    conll(tmp_path / "dev.conll", [(["a", "b", "c"], ["B-X", "O", "I-X"])])
    data = load(tmp_path)
    assert data.config.scheme == "bio" and data.metadata["entities"] == {"X": 2}
    assert "1 training entity begins with I" in data.metadata["warnings"][0]
    details = evaluation(learner_of(data, tokenizers), data.validation["dev"]).details
    assert details["gold_beginning_with_i"] == 1
    assert details["classes"]["X"]["support"] == 2 and details["classes"]["X"].keys() >= {"precision", "recall", "f1"}


def test_texts_are_split_at_whitespace(tokenizers, tmp_path):
    learner = learner_of(load(tagged_folder("ner", tmp_path)), tokenizers)
    rows = learner.responder().read_rows({"tokens": ["a fine  film"]}, [("text", 1)])
    assert isinstance(rows, Rows) and rows.columns["tokens"] == [["a", "fine", "film"]] and rows.labels is None
    record = {"tokens": ["a", "fine", "film"], "prediction": ["O", "B-PER", "I-PER"], "score": 0.5}
    assert learner.responder().line(record) == "a fine/B-PER film/I-PER"


def test_constant_tags_warn(tokenizers, tmp_path):
    data = load(tagged_folder("ner", tmp_path))
    learner = learner_of(data, tokenizers)
    with torch.no_grad():
        learner.heads["ner"].output.weight.zero_()
        learner.heads["ner"].output.bias[0] += 9
    assert evaluation(learner, data.validation["dev"]).warnings == (
        "every word was predicted O: the model predicts a constant",
    )


@pytest.mark.parametrize("name", ["ner", "pos"])
def test_resampled_scores_match_metrics_of_sample(name, tokenizers, tmp_path):
    data = load(tagged_folder(name, tmp_path), name)
    rows, kind = data.train, learner_of(data, tokenizers).kind
    other = [tags[:2] + [0] * len(tags[2:]) for tags in rows.labels]
    guessed = [Prediction(value, 1.0) for value in other]
    numbers = np.array([0, 3, 3, 5, 1, 11])
    sample = kind.metrics(rows.take(numbers), [guessed[number] for number in numbers])
    assert all(0 < value < 1 for name, value in sample.items() if name != "precision")
    quick = kind.resampled(rows, guessed, [numbers])
    assert quick.keys() == sample.keys()
    assert {key: values[0] for key, values in quick.items()} == pytest.approx(sample, abs=1e-12)
