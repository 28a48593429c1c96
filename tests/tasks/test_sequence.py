"""Classification and regression: shipped tasks train, losses match torch, packing does not change gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from task_fixtures import (
    CONF,
    SIZES,
    TEXTS,
    backbone,
    evaluation,
    examples_of,
    glue,
    singles,
    split_data,
    table,
    task_config,
    task_data,
    tokenizer,
)  # fmt: skip

from lmtool.config.registry import build
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.evaluation import SplitEvaluations, evaluate
from lmtool.models.configs import BertConfig, Gpt1Config, GptConfig
from lmtool.models.heads.base import loss_sum
from lmtool.tasks import loading
from lmtool.tasks.loading import load_task
from lmtool.tuning.configs.methods import FullConfig, HeadConfig
from lmtool.types import Packed
from lmtool.weights.saved_model import CheckpointModel

KINDS = ("classification", "multi_label", "regression")
# AX has no training data.
TASKS = sorted(path.stem for path in CONF.glob("*.yaml") if task_data(path.stem)["kind"] in KINDS and path.stem != "ax")


@pytest.fixture(scope="module")
def tokenizers():
    return {"bert": tokenizer(), "gpt": tokenizer("bytebpe")}


def data_of(name, folder, monkeypatch=None, **overrides):
    """A shipped task over a tiny data set in the layout of its source."""
    if name == "pydocs":
        columns, rows = {"text": TEXTS[:6], "label": ["ast", "json"] * 3}, [("x.py", number) for number in range(6)]
        monkeypatch.setattr(loading, "pydocs_rows", lambda _: dict.fromkeys(["train", "dev"], (columns, rows)))
    elif name in ("classification", "custom", "regression", "multi_label"):
        labels = ["a", "", "a,b", "c"] if name == "multi_label" else [1, 0]
        table(folder / "train.tsv", ["text", "label"], singles(12, labels))
        overrides["path"] = folder
    else:
        overrides["path"] = glue(name, folder)
    return load_task(task_config(name, **overrides), 0, folder / "cache", True)


def batch_of(examples, numbers):
    numbers = np.asarray(numbers)
    return examples.batch(examples.plan(0).rows[numbers], numbers, 0)


def step(learner, batches):
    learner.zero_grad()
    count = sum(learner.counts(batch)[learner.config.name] for batch in batches)
    loss = 0.0
    for batch in batches:
        output = learner(batch, 1).sums[learner.config.name] / count
        output.backward()
        loss += output.item()
    return loss, {
        name: parameter.grad.clone() for name, parameter in learner.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("family", ["bert", "gpt"])
@pytest.mark.parametrize("name", TASKS)
def test_packing_keeps_loss_and_gradients(name, family, tokenizers, tmp_path, monkeypatch):
    data = data_of(name, tmp_path, monkeypatch)
    learner = data.config.learner(backbone(family), tokenizers[family], 0).train()
    assert set(learner.heads) == ({"pooler", data.config.name} if family == "bert" else {data.config.name})
    examples = examples_of(learner, data.train, 32, "train")
    loss, gradients = step(learner, [batch_of(examples, range(6))])
    assert gradients.keys() == set(dict(learner.named_parameters()))
    single_loss, single = step(learner, [batch_of(examples, [number]) for number in range(6)])
    assert single_loss == pytest.approx(loss, rel=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(single[key], gradient, rtol=1e-4, atol=1e-6)
    split = next(iter(data.validation.values()))
    assert evaluation(learner, split).metrics().keys() == {"loss", *data.config.metrics}
    train, held_out = split_data(learner, data.train), split_data(learner, split, "dev")
    assert learner.baseline(train, held_out, [], {})["metric"] == data.config.metric


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", ["none", "balanced", [1.0, 3.5]])
def test_loss_matches_torch_cross_entropy(smoothing, weights, tokenizers, tmp_path):
    table(tmp_path / "train.tsv", ["text", "label"], singles(9, [1, 0, 0]))
    config = task_config("classification", path=tmp_path, loss__label_smoothing=smoothing, loss__class_weights=weights)
    data = load_task(config, 0, tmp_path, True)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0).eval()
    examples = examples_of(learner, data.train, 32, "train")
    batches = [batch_of(examples, [0, 1, 2]), batch_of(examples, [3, 4, 5, 6])]
    count = sum(learner.counts(batch)[config.name] for batch in batches)
    ours = sum(learner(batch, 1).sums[config.name] for batch in batches) / count
    logits = torch.cat([learner.outputs(batch, 0) for batch in batches])
    labels = torch.cat([batch.targets[config.name].labels for batch in batches])
    tensor = None if weights == "none" else torch.tensor(data.config.loss.class_weights)
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels, tensor, label_smoothing=smoothing))
    # Evaluation reports the plain cross entropy.
    scores = torch.cat([learner.score(batch)[config.name].losses for batch in batches])
    torch.testing.assert_close(scores, F.cross_entropy(logits, labels, reduction="none"))


@pytest.mark.parametrize("weights", ["none", [1.0, 3.5]])
def test_focal_loss_matches_definition(weights, tokenizers, tmp_path):
    table(tmp_path / "train.tsv", ["text", "label"], singles(9, [1, 0, 0]))
    config = task_config("classification", path=tmp_path, loss__focal_gamma=2.0, loss__class_weights=weights)
    data = load_task(config, 0, tmp_path, True)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0).eval()
    batch = batch_of(examples_of(learner, data.train), range(6))
    ours = learner(batch, 1).sums[config.name] / learner.counts(batch)[config.name]
    labels = learner.labels(batch)
    p = learner.outputs(batch, 0).softmax(-1).gather(1, labels[:, None])[:, 0]
    each = torch.ones(6) if weights == "none" else torch.tensor(weights)[labels]
    torch.testing.assert_close(ours, (each * (1 - p) ** 2 * -p.log()).sum() / each.sum())
    sure = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss_sum(sure, torch.tensor([0]), focal_gamma=0.5).backward()
    assert torch.isfinite(sure.grad).all()


def test_head_reads_first_or_last_token(tokenizers, tmp_path):
    data = data_of("sst2", tmp_path)
    for family, place in (("bert", 0), ("gpt", -1)):
        learner = data.config.learner(backbone(family), tokenizers[family], 0).eval()
        batch = batch_of(examples_of(learner, data.train, 32, "train"), range(4))
        hidden = learner.backbone(batch.inputs)
        ends = np.cumsum(batch.inputs.lengths)
        picked = hidden[torch.tensor([batch.inputs.starts, (ends - 1).tolist()][place])]
        special = tokenizers[family].role("cls" if family == "bert" else "eos")
        assert (batch.inputs.tokens[torch.tensor([batch.inputs.starts, (ends - 1).tolist()][place])] == special).all()
        pooled = torch.tanh(learner.heads["pooler"].dense(picked)) if family == "bert" else picked
        torch.testing.assert_close(learner.outputs(batch, 0), learner.heads["sst2"].output(pooled))


@pytest.mark.parametrize(
    ("family", "pooling", "layers"),
    [("bert", "mean", None), ("bert", "max", 2), ("bert", "first", 1), ("gpt", "mean", 2), ("bert", "last", None)],
)
def test_pooling_and_head_layers_match_reference(family, pooling, layers, tokenizers, tmp_path):
    data = data_of("sst2", tmp_path, pooling=pooling, head_layers=layers)
    learner = data.config.learner(backbone(family), tokenizers[family], 0).eval()
    batch = batch_of(examples_of(learner, data.train, 32, "train"), range(4))
    parts = learner.backbone(batch.inputs).split(list(batch.inputs.lengths))
    pool = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "first": lambda x: x[0], "last": lambda x: x[-1]}
    wanted, head = torch.stack([pool[pooling](part) for part in parts]), learner.heads["sst2"]
    assert set(learner.heads) == {"sst2"} and (head.dense is None) == (layers != 2)
    wanted = wanted if head.dense is None else torch.tanh(head.dense(wanted))
    torch.testing.assert_close(learner.outputs(batch, 0), head.output(wanted))
    step(learner.train(), [batch])
    # `lmtool.load` gives the same logits.
    tensors = learner.state_dict()
    loaded = CheckpointModel(build(learner.backbone.config, 0), tensors, data.config.model_dump())
    loaded.load_state_dict(tensors)
    hidden = loaded.eval().hidden(batch.inputs, None)
    torch.testing.assert_close(loaded.logits(hidden, batch.inputs), learner.eval().outputs(batch, 0))


@pytest.mark.parametrize("name", ["sst2", "rte"])
def test_gpt1_head_adds_special_tokens(name, tokenizers, tmp_path):
    """[START] a [EXTRACT] and [START] a [DELIM] b [EXTRACT], embedded by the head (Radford et al. 2018, 3.3)."""
    data, words = data_of(name, tmp_path, auxiliary_lm=0.5), tokenizers["gpt"]
    learner = data.config.learner(build(Gpt1Config(**SIZES), 0), words, 0).train()
    batch = batch_of(examples_of(learner, data.train, 48), [0])
    texts = [words.encode(column[0]).tolist() for column in data.train.columns.values()]
    wanted = [300, *texts[0], *([301, *texts[1]] if name == "rte" else []), 302]
    assert batch.inputs.tokens.tolist() == wanted
    pieces = learner.tokenizer.pieces(wanted)
    assert (pieces[0], pieces[-1]) == ("[START]", "[EXTRACT]") and ("[DELIM]" in pieces) == (name == "rte")
    # The language model does not predict the added tokens.
    assert learner.counts(batch)["lm"] == len(wanted) - len(texts) - 1
    learner(batch, 1).sums[name].backward()
    table = learner.heads[name].tokens.weight
    assert (table.grad.abs().sum(-1) > 0).tolist() == [True, name == "rte", True]
    assert learner.backbone.embed.token.weight.shape[0] == 300 and not any(
        "further" in key for key in learner.state_dict()
    )
    assert {key for key in learner.state_dict() if "tokens" in key} == {f"heads.{name}.tokens.weight"}
    with torch.no_grad():
        embedded = learner.backbone.embed.tokens(batch.inputs.tokens)
    torch.testing.assert_close(embedded[[0, -1]], table[[0, 2]])
    # `lmtool.load` has these tokens too; head=transformers has none.
    tensors = learner.eval().state_dict()
    loaded = CheckpointModel(build(learner.backbone.config, 0), tensors, data.config.model_dump())
    loaded.load_state_dict(tensors, strict=False)
    assert loaded.first_token == 300
    hidden = loaded.eval().hidden(batch.inputs, None)
    torch.testing.assert_close(loaded.logits(hidden, batch.inputs), learner.outputs(batch, 0))
    theirs = data_of(name, tmp_path, head="transformers").config.learner(learner.backbone, words, 0)
    assert theirs.heads[name].tokens is None
    assert batch_of(examples_of(theirs, data.train, 48), [0]).inputs.tokens.tolist() == sum(texts, [])


@pytest.mark.parametrize("name", ["mrpc", "stsb"])
def test_gpt1_adds_the_representations_of_both_orders(name, tokenizers, tmp_path):
    """Radford et al. 2018, section 3.3: [START] a [DELIM] b [EXTRACT] and [START] b [DELIM] a [EXTRACT] are read
    separately, and the states of their last tokens are added before the linear layer."""
    data, words = data_of(name, tmp_path, auxiliary_lm=0.5), tokenizers["gpt"]
    learner = data.config.learner(build(Gpt1Config(**SIZES, dropout=0.0), 0), words, 0).eval()
    rows, head = data.train, learner.heads[name]
    batch = batch_of(examples_of(learner, rows, 48), [2, 0, 1])
    wanted, labels, predicting = [], [], 0
    for row in (2, 0, 1):
        first, second = (words.encode(column[row]).tolist() for column in rows.columns.values())
        states = []
        for one, other in ((first, second), (second, first)):
            tokens = torch.tensor([300, *one, 301, *other, 302])
            states.append(learner.backbone(Packed(tokens, (len(tokens),)))[-1])
            predicting += len(tokens) - 3
        wanted.append(head.output(states[0] + states[1]))
        labels.append(np.asarray(rows.labels)[row])
    outputs = learner.outputs(batch, 0)
    torch.testing.assert_close(outputs, torch.stack(wanted))
    labels = torch.tensor(np.array(labels))
    loss = F.mse_loss if name == "stsb" else F.cross_entropy
    expected = loss(
        outputs[:, 0] if name == "stsb" else outputs,
        labels.to(outputs.dtype if name == "stsb" else torch.int64),
        reduction="sum",
    )
    assert learner(batch, 1).sums[name].item() == pytest.approx(expected.item(), rel=1e-5)
    assert learner.counts(batch) == {name: 3.0, "lm": predicting}
    # Swapped texts have the same prediction, and each row has one.
    scored = evaluation(learner, rows, max_length=48)
    swapped = evaluation(learner, swapped_texts(rows), max_length=48)
    assert [one.value for one in scored.predictions] == pytest.approx([one.value for one in swapped.predictions])
    assert len(scored.predictions) == len(scored.losses) == len(rows)
    assert [scored.predictions[row].value for row in (2, 0, 1)] == pytest.approx(
        [part.value for part in learner.parts(outputs, batch)]
    )
    assert len(learner.samples(batch, 3)) == 3
    assert step(learner.train(), [batch])
    one_order = task_config(name, symmetric=False).learner(learner.backbone, words, 0)
    assert len(batch_of(examples_of(one_order, rows, 48), [0]).inputs.lengths) == 1
    with_bert = task_config(name).learner(backbone("bert"), tokenizers["bert"], 0)
    assert with_bert.orders == 1
    # The loaded model has no logits for one order.
    tensors = learner.eval().state_dict()
    loaded = CheckpointModel(build(learner.backbone.config, 0), tensors, data.config.model_dump())
    with pytest.raises(UserError, match="reads both orders"):
        loaded.logits(learner.backbone(batch.inputs), batch.inputs)


def swapped_texts(rows):
    (first, firsts), (second, seconds) = rows.columns.items()
    return replace(rows, columns={first: seconds, second: firsts})


def test_head_tuning_trains_special_tokens(tokenizers, tmp_path):
    data = data_of("sst2", tmp_path)
    learner = data.config.learner(build(Gpt1Config(**SIZES), 0), tokenizers["gpt"], 0).train()
    learner.tune(build(HeadConfig()), frozenset({"heads.sst2"}))
    batch = batch_of(examples_of(learner, data.train), [0, 1])
    learner(batch, 1).sums["sst2"].backward()
    assert learner.heads["sst2"].tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["sst2", "stsb", "multi_label"])
def test_auxiliary_lm_loss_matches_reference(name, tokenizers, tmp_path):
    data = data_of(name, tmp_path, auxiliary_lm=0.5)
    learner = data.config.learner(backbone("gpt"), tokenizers["gpt"], 0).eval()
    batch = batch_of(examples_of(learner, data.train), range(4))
    output, counts = learner(batch, 1), learner.counts(batch)
    hidden_TH, lengths = learner.backbone(batch.inputs), list(batch.inputs.lengths)
    logits = [part @ learner.backbone.embed.token.weight.T for part in hidden_TH.split(lengths)]
    texts = batch.inputs.tokens.long().split(lengths)
    pairs = zip(logits, texts, strict=True)
    wanted = sum(F.cross_entropy(part[:-1], text[1:], reduction="sum") for part, text in pairs)
    torch.testing.assert_close(output.sums["lm"], wanted)
    assert output.loss_weights == {data.config.name: 1.0, "lm": 0.5} and counts["lm"] == sum(lengths) - 4
    plain = data_of(name, tmp_path).config.learner(learner.backbone, tokenizers["gpt"], 0).eval()
    plain.load_state_dict(learner.state_dict())
    torch.testing.assert_close(output.sums[data.config.name], plain(batch, 1).sums[data.config.name])
    assert plain.counts(batch) == {data.config.name: counts[data.config.name]}
    assert learner.baseline_loss([batch], {}) == pytest.approx(0.5 * np.log(300))
    assert data.config.first_conflict(BertConfig()).key == "task.auxiliary_lm"
    assert data.config.first_conflict(GptConfig()) is None


def test_head_form_depends_on_model_and_settings(tmp_path):
    model, config = BertConfig(), task_config("sst2", path=tmp_path)
    paper = model.sequence_form()
    assert task_config("sst2", pooling="first", head_layers=2).form(model) == paper == config.form(model)
    assert config.takes_head({"pooling": "mean"}, model) and config.with_head({"pooling": "mean"}).pooling == "mean"
    assert not task_config("sst2", pooling="max").takes_head({"pooling": "mean"}, model)
    assert task_config("sst2", pooling="first").takes_head({"head": "transformers"}, model)
    assert "attends to none of the text" in task_config("sst2", pooling="first").first_conflict(GptConfig()).message
    assert config.first_conflict(GptConfig()) is None


def test_long_texts_are_truncated_and_counted(tokenizers, tmp_path):
    rows = [["word " * 40, "short", "a"], ["a b", "c " * 50, "b"], ["x", "y", "a"], ["w " * 30, "v " * 30, "b"]]
    table(tmp_path / "train.tsv", ["one", "two", "label"], rows)
    table(tmp_path / "dev.tsv", ["one", "two", "label"], rows)
    data = load_task(task_config("classification", path=tmp_path, text=["one", "two"]), 0, tmp_path, True)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0)
    examples = examples_of(learner, data.train, 16, "train")
    batch = batch_of(examples, range(4))
    assert max(batch.inputs.lengths) == 16 and examples.metadata()["truncated"] == 3
    assert examples.metadata()["truncated_fraction"] == 0.75
    second = [int((part == 1).sum()) for part in batch.inputs.columns["segment"].split(batch.inputs.lengths)]
    assert second[0] == len(tokenizers["bert"].encode("short")) + 1  # the longer text is truncated
    assert second[3] == 7 + 1  # of equally long texts, the second keeps one more token


def test_prediction_records_have_row_and_scores(tokenizers, tmp_path):
    data = data_of("mnli", tmp_path)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0).train()
    splits = {}
    for split, rows in data.validation.items():
        splits[split] = evaluation(learner, rows, split, batch_tokens=40)
    assert learner.training
    joined = SplitEvaluations(splits)
    lines = list(joined.records())
    assert learner.metric.name == "accuracy"
    assert joined.metrics()["accuracy"] == splits["dev_matched"].metrics()["accuracy"]
    assert {"loss", "accuracy", "dev_matched_accuracy", "dev_mismatched_accuracy"} <= joined.metrics().keys()
    rows = data.validation["dev_matched"]
    first = lines[2]
    assert list(first) == ["id", "split", "premise", "hypothesis", "gold", "prediction", "score", "probabilities"]
    assert first["premise"] == rows.columns["premise"][2] and first["gold"] == "entailment" and first["id"] == "2"
    single = learner.eval().outputs(batch_of(examples_of(learner, rows, 32, "dev"), [2]), 0)[0].softmax(-1)
    assert first["prediction"] == data.config.labels[int(single.argmax())]
    assert first["score"] == pytest.approx(float(single.max()), rel=1e-5)
    counts = np.array(splits["dev_matched"].details["confusion"])
    assert counts.sum() == 6 and np.trace(counts) / 6 == pytest.approx(splits["dev_matched"].metrics()["accuracy"])


def test_constant_predictions_warn(tokenizers, tmp_path):
    data = data_of("cola", tmp_path)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0)
    with torch.no_grad():
        learner.heads["cola"].output.bias.copy_(torch.tensor([0.0, 50.0]))
    rows = data.validation["dev"]
    joined = SplitEvaluations({"dev": evaluation(learner, rows)})
    assert joined.metrics()["matthews"] == 0.0 and "dev: every row was predicted acceptable" in joined.warnings[0]
    majority = learner.baseline(split_data(learner, data.train), split_data(learner, rows, "dev"), [], {})
    assert majority["name"] == "majority" and majority["metrics"]["accuracy"] == 0.5


def test_unlabeled_rows_are_predicted(tokenizers, tmp_path):
    data = data_of("sst2", tmp_path)
    learner = data.config.learner(backbone("gpt"), tokenizers["gpt"], 0)
    rows = data.test["test"]
    unlabeled = evaluation(learner, rows, "test", batch_examples=1)
    lines = list(unlabeled.records())
    assert not unlabeled.terms and not unlabeled.scores
    assert [line["sentence"] for line in lines] == ["uneasy mishmash", "a treat"] and "gold" not in lines[0]
    data, examples = split_data(learner, rows, "test"), examples_of(learner, rows, 32, "test")
    with pytest.raises(RuntimeError, match="2 rows: 1 outputs arrived, for 1 of 2 parts"):
        evaluate(learner, learner.scorer(data, examples, {}), [batch_of(examples, [0])])
    with pytest.raises(RuntimeError, match="2 rows: 2 outputs arrived, for 1 of 2 parts"):
        evaluate(learner, learner.scorer(data, examples, {}), [batch_of(examples, [0]), batch_of(examples, [0])])


@pytest.mark.parametrize("new", [None, {"heads.sst2"}, {"heads.sst2", "heads.pooler"}])
def test_head_tuning_freezes_backbone_and_loaded_pooler(new, tokenizers, tmp_path):
    data = data_of("sst2", tmp_path)
    learner = data.config.learner(backbone(), tokenizers["bert"], 0).train()
    learner.tune(build(HeadConfig()), new)
    pooler = new is None or "heads.pooler" in new
    learns = {name.rsplit(".", 2)[0] for name, parameter in learner.named_parameters() if parameter.requires_grad}
    assert learns == ({"heads.sst2", "heads.pooler"} if pooler else {"heads.sst2"})
    assert {name.rsplit(".", 2)[0] for name in learner.tuning.delta_names(learner)} == learns
    batch = batch_of(examples_of(learner, data.train, 32, "train"), range(6))
    _, gradients = step(learner, [batch])
    assert {name.rsplit(".", 2)[0] for name in gradients} == learns
    assert {name for group in learner.parameter_groups() for name, _ in group.parameters} == set(gradients)
    # A frozen backbone has no dropout; only the head has.
    seen = []
    learner.heads["pooler"].register_forward_hook(lambda _, given, __: seen.append(given[0]))
    learner(batch, 1), learner(batch, 2)
    assert torch.equal(*seen)
    learner.tune(build(FullConfig()))
    assert all(parameter.requires_grad for parameter in learner.parameters())
    learner(batch, 1), learner(batch, 2)
    assert not torch.equal(*seen[2:])


def test_training_fits_separable_texts(tokenizers, tmp_path):
    table(
        tmp_path / "train.tsv",
        ["text", "label"],
        [[text, label] for text, label in zip(TEXTS[:4] * 6, ["good", "good", "bad", "bad"] * 6, strict=True)],
    )
    table(tmp_path / "dev.tsv", ["text", "label"], [["a fine film", "good"], ["a dull mess", "bad"]])
    data = load_task(task_config("classification", path=tmp_path), 0, tmp_path, True)
    learner = data.config.learner(backbone("gpt"), tokenizers["gpt"], 0).train()
    optimizer = torch.optim.AdamW(learner.parameters(), 2e-3)
    loader = PackedLoader(examples_of(learner, data.train, 32, "train"), 0, batch_examples=8)
    steps = loader.steps(None)
    for number in range(1, 31):
        (batch,) = next(steps).batches
        (learner(batch, number).sums["classification"] / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps.close()
    rows = data.validation["dev"]
    assert evaluation(learner, rows).metrics()["accuracy"] == 1.0


@pytest.mark.parametrize(("rule", "lengths"), [("longest_first", (6, 7)), ("bert", (7, 6))])
def test_pairs_are_truncated_by_task_rule(rule, lengths, tokenizers, tmp_path):
    table(tmp_path / "train.tsv", ["a", "b", "label"], [["a film " * 5, "a film " * 9, label] for label in (0, 1)])
    table(tmp_path / "dev.tsv", ["a", "b", "label"], [["a", "b", 0]])
    config = task_config("classification", path=tmp_path, text=["a", "b"], truncation=rule)
    data = load_task(config, 0, tmp_path / "cache", True)
    learner = build(data.config).learner(backbone(), tokenizers["bert"], 0)
    segments = batch_of(examples_of(learner, data.train, 16), [0]).inputs.columns["segment"]
    assert ((segments == 0).sum() - 2, (segments == 1).sum() - 1) == lengths  # without [CLS] and [SEP]
    (problem,) = task_config("classification", truncation="bert", head="prompt").conflicts("task")
    assert "task.truncation=bert applies to heads over the whole text" in problem.message
