"""Extractive question answering: windows, answer positions, losses, best spans, thresholds and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from task_fixtures import backbone as tiny_backbone
from task_fixtures import evaluation, examples_of, split_data, task_config

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.evaluation import evaluate
from lmtool.models.encoder_decoder_configs import BartConfig
from lmtool.tasks.kinds.extractive_qa import SPANS, PredictedAnswer, Span, WindowAnswers, best_spans
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.loading import load_task
from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig

CONTEXT = "Ångström  met Zoë in the naïve town, near 3.14 rivers; a dog (old) saw both of them by the sea shore there. "
LONG = CONTEXT * 3 + "Nobody else came."
FAMILIES = {
    "bert": ("wordpiece", lambda: tiny_backbone()),
    "gpt": ("bytebpe", lambda: tiny_backbone("gpt")),
    "bart": (
        "roberta",
        lambda: build(
            BartConfig(
                vocab_size=340, num_layers=1, decoder_layers=1, hidden_size=16, num_heads=2, feedforward_size=24,
                max_positions=64,
            ),
            0,
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers():
    texts = [CONTEXT] * 6
    return {
        "wordpiece": build(WordPieceConfig(minimum_count=1), texts, 290),
        "bytebpe": build(ByteBpeConfig(minimum_count=1), texts, 299),
        "roberta": build(ByteBpeConfig(minimum_count=1, special_tokens="roberta"), texts, 330),
    }


def answer(text, context=LONG):
    return {"text": [text], "answer_start": [context.index(text)]}


def rows_of_file(count=6, impossible=()):
    texts = ["Zoë", "naïve town", "3.14 rivers", "dog (old)", "them by", "Nobody else"]
    return [
        {
            "id": f"q{number}", "question": f"who met number {number}?", "context": LONG,
            "answers": {"text": [], "answer_start": []} if number in impossible else answer(texts[number % 6]),
        }
        for number in range(count)
    ]  # fmt: skip


def write(folder, rows, name="train"):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_of(name, folder, rows=None, **overrides):
    impossible = (1, 4) if name == "squad_v2" else ()
    write(folder, rows or rows_of_file(impossible=impossible))
    write(folder, rows_of_file(impossible=impossible), "dev")
    return load_task(task_config(name, path=folder, **overrides), 0, folder / "cache", True)


def learner_of(data, family, tokenizers):
    kind, make = FAMILIES[family]
    return data.config.learner(make(), tokenizers[kind], 0)


def whole_batch(examples):
    plan = examples.plan(0)
    return examples.batch(plan.rows, np.arange(len(plan)), 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["extractive_qa", "squad", "squad_v2"])
def test_packed_windows_match_single_windows(name, family, tokenizers, tmp_path):
    data = data_of(name, tmp_path)
    learner = learner_of(data, family, tokenizers).train()
    assert set(learner.heads) == {name}
    examples = examples_of(learner, data.train, 48)
    plan, term = examples.plan(0), data.config.name
    assert len(plan) > len(data.train)
    batch = whole_batch(examples)
    output, count = learner(batch, 1), learner.counts(batch)[term]
    assert count == 2 * len(plan)
    (output.sums[term] / count).backward()
    gradients = {key: parameter.grad.clone() for key, parameter in learner.named_parameters()}
    learner.zero_grad()
    for number in range(len(plan)):
        (learner(examples.batch(plan.rows[[number]], np.array([number]), 0), 1).sums[term] / count).backward()
    for key, parameter in learner.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-6)
    scored = evaluation(learner, data.validation["dev"], max_length=48)
    assert scored.metrics().keys() == {"loss", *data.config.metrics}
    sets = split_data(learner, data.train), split_data(learner, data.validation["dev"], "dev")
    assert learner.baseline(*sets, [], {})["metric"] == "f1"
    predictor = learner.predictors(sets[0], examples)[term]
    assert np.isfinite(predictor.losses(batch.targets[term].labels.numpy())).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_cover_answers_and_windows_cover_context(family, tokenizers, tmp_path):
    data = data_of("squad", tmp_path)
    learner = learner_of(data, family, tokenizers)
    examples = examples_of(learner, data.train, 48)
    batch = whole_batch(examples)
    starts, ends = (batch.inputs.columns[name] for name in ("character_start", "character_end"))
    targets = batch.targets["squad"].labels
    seen = np.zeros((len(data.train), len(LONG)), dtype=bool)
    exact = set()
    for number, (first, length) in enumerate(zip(batch.inputs.starts, batch.inputs.lengths, strict=True)):
        own = slice(first, first + length)
        for start, end in zip(starts[own].tolist(), ends[own].tolist(), strict=True):
            seen[batch.rows[number], start:end] = True
        start, end = targets[number].tolist()
        row = int(batch.rows[number])
        if int(ends[own][start]) == 0:
            null = 0 if family != "gpt" else length - 1
            assert (start, end) == (null, null)
        else:
            text = LONG[int(starts[own][start]) : int(ends[own][end])]
            gold = data.train.labels[row][0]
            # A token may extend past the answer.
            assert gold.text in text and len(text) <= len(gold.text) + 12
            exact.add(row)
    assert exact == set(range(len(data.train)))
    assert all(seen[row, place] for row in range(len(data.train)) for place, x in enumerate(LONG) if not x.isspace())
    assert examples.metadata()["answers_in_no_window"] == 0


def test_loss_is_mean_of_start_and_end_losses(tokenizers, tmp_path):
    data = data_of("squad", tmp_path)
    learner = learner_of(data, "bert", tokenizers).eval()
    batch = whole_batch(examples_of(learner, data.train, 48))
    outputs, labels = learner.outputs(batch, 0), batch.targets["squad"].labels
    expected = [
        (F.cross_entropy(part[None, :, 0], gold[:1]) + F.cross_entropy(part[None, :, 1], gold[1:])) / 2
        for part, gold in zip(outputs.split(list(batch.inputs.lengths)), labels, strict=True)
    ]
    ours = learner(batch, 1).sums["squad"] / learner.counts(batch)["squad"]
    torch.testing.assert_close(ours, torch.stack(expected).mean())
    torch.testing.assert_close(learner.score(batch)["squad"].losses.mean(), ours)


def test_best_spans_match_exhaustive_search():
    torch.manual_seed(0)
    starts, ends, allowed = torch.randn(3, 9), torch.randn(3, 9), torch.rand(3, 9) > 0.3
    allowed[2] = False
    allowed[2, 4] = True
    scores, first, last = best_spans(starts, ends, allowed, 4, 50)
    for row in range(3):
        every = {
            (a, b): float(starts[row, a] + ends[row, b])
            for a in range(9) for b in range(a, min(9, a + 4)) if allowed[row, a] and allowed[row, b]
        }  # fmt: skip
        spans_K = [
            ((int(a), int(b)), float(score))
            for score, a, b in zip(scores[row], first[row], last[row], strict=True)
            if score > -torch.inf
        ]
        assert [pair for pair, _ in spans_K] == sorted(every, key=lambda pair: -every[pair])
        assert all(abs(every[pair] - score) < 1e-6 for pair, score in spans_K)


def kind_of(name="squad_v2", **fields):
    return build(task_config(name, path="x", **fields))


def test_window_answers_are_merged():
    kind = kind_of(n_best=2)
    first = WindowAnswers(np.array([(3, 5, 4.0), (0, 2, 1.0)], SPANS), 3.0)
    second = WindowAnswers(np.array([(3, 5, 4.5), (8, 9, 2.0)], SPANS), 2.0)
    prediction = kind.join([first, second])
    assert prediction.value.best_spans == (Span(3, 5, 4.5), Span(8, 9, 2.0)) and prediction.value.null == 2.0
    fractions = np.exp([4.5, 2.0, 2.0])
    assert prediction.score == pytest.approx(fractions[0] / fractions.sum())
    rows = Rows(["a"], {"question": ["who?"], "context": ["abcdefghij"]}, None, [("x", 1)])
    record = kind.record(rows, 0, kind.with_threshold(prediction, -2.5))
    assert (record["prediction"], record["start"], record["end"]) == ("de", 3, 5)
    assert [row["text"] for row in record["n_best"]] == ["de", "i", ""]
    assert sum(row["probability"] for row in record["n_best"]) == pytest.approx(1)
    record = kind.record(rows, 0, kind.with_threshold(prediction, -2.6))
    assert record["prediction"] == "" and record["null_difference"] == -2.5


def test_null_threshold_is_tuned_and_stored(tokenizers, tmp_path):
    data = data_of("squad_v2", tmp_path)
    learner = learner_of(data, "bert", tokenizers).eval()
    rows = data.validation["dev"]
    best = [[(answers[0].start, answers[0].start + len(answers[0].text), 1.0)] if answers else [(0, 2, 1.0)]
            for answers in rows.labels]  # fmt: skip
    # Every span is right; the null score is higher for questions without an answer.
    nulls = [6.0 if not answers else 2.0 + number / 10 for number, answers in enumerate(rows.labels)]
    predictions = [
        Prediction(PredictedAnswer(np.array(spans, SPANS), null), 1.0) for spans, null in zip(best, nulls, strict=True)
    ]
    # The untuned threshold is 0.
    assert [row.value.answered for row in learner.with_thresholds(predictions)] == [False] * len(rows)
    learner.calibrate(rows, predictions)
    assert learner.state_dict()["heads.squad_v2.null_threshold"].item() == pytest.approx(1.5)
    scores = learner.kind.metrics(rows, learner.with_thresholds(predictions))
    assert scores["f1"] == scores["best_f1"] == 1.0 and scores["no_answer_accuracy"] == 1.0
    draws = [np.arange(len(rows)), np.array([1, 4, 4])]
    sampled = learner.kind.resampled(rows, learner.with_thresholds(predictions), draws)
    assert sampled["f1"] == [1.0, 1.0] and sampled["has_answer_f1"] == [1.0, 0.0]
    # An evaluation tunes only if scorer.calibrates; task.null_threshold= is kept.
    examples = examples_of(learner, rows, 48, "dev")
    for calibrates in (False, True):
        learner.heads["squad_v2"].null_threshold.fill_(99.0)
        scorer = learner.scorer(split_data(learner, rows, "dev"), examples, {})
        scorer.calibrates = calibrates
        evaluate(learner, scorer, [whole_batch(examples)])
        assert (learner.heads["squad_v2"].null_threshold.item() != 99.0) == calibrates
    given = learner_of(data_of("squad_v2", tmp_path, null_threshold=0.5), "bert", tokenizers)
    given.calibrate(rows, predictions)
    assert given.heads["squad_v2"].null_threshold.item() == 0.5


def test_article_alone_is_not_no_answer(tokenizers, tmp_path):
    rows = data_of("squad_v2", tmp_path).validation["dev"]
    kind = learner_of(data_of("squad_v2", tmp_path), "bert", tokenizers).kind
    the = LONG.index("the ")
    texts = [(own[0].start, own[0].start + len(own[0].text)) if own else (the, the + 3) for own in rows.labels]
    predictions = [
        Prediction(PredictedAnswer(np.array([(*span, 1.0)], SPANS), 2.0 if own else 0.0), 1.0)
        for span, own in zip(texts, rows.labels, strict=True)
    ]
    # With all six answers given, four are right, and "the" does not equal "no answer", as in evaluate-v2.0.
    assert kind.metrics(rows, predictions)["best_f1"] == pytest.approx(4 / 6)
    assert kind.tuned_threshold(rows, predictions) == 1.0


def test_predictions_are_spans_of_context(tokenizers, tmp_path):
    data = data_of("squad", tmp_path)
    learner = learner_of(data, "bert", tokenizers).eval()
    records = list(evaluation(learner, data.validation["dev"], max_length=48).records())
    assert len(records) == 6
    for record in records:
        assert record["prediction"] == LONG[record["start"] : record["end"]] != ""
        assert record["gold"] and len(record["n_best"]) == 20
        assert record["n_best"][0]["text"] == record["prediction"]


def test_questions_of_same_context_are_held_out_together(tmp_path):
    rows = [{**row, "context": f"{LONG} {number % 3}"} for number, row in enumerate(rows_of_file(30))]
    write(tmp_path, rows)
    data = load_task(task_config("squad", path=tmp_path), 0, tmp_path / "cache", True)
    held, trained = (set(part.columns["context"]) for part in (data.validation["dev"], data.train))
    assert held and not held & trained


def rows_with_change(**fields):
    rows = rows_of_file()
    return [*rows[:2], {**rows[2], **fields}, *rows[3:]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answers": {"text": ["Zoe"], "answer_start": [14]}}, "train.jsonl:3: q2: the answer 'Zoe' is not in its con"),
        ({"answers": {"text": ["Zoë"], "answer_start": [13]}}, "answer_start=13 does not point at the answer 'Zoë'"),
        ({"answers": {"text": [""], "answer_start": [0]}}, "an empty answer"),
        ({"answers": {"text": [], "answer_start": []}}, "a question without an answer"),
        ({"answers": {"text": ["Zoë"]}}, "train.jsonl:3: unknown layout of answers"),
        ({"id": "q1"}, "train.jsonl:3: id=q1 repeats the id of .*train.jsonl:2"),
    ],
)
def test_invalid_answers_are_refused_with_file_and_line(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        data_of("squad", tmp_path, rows_with_change(**fields))
    if "is not in" in message:
        data = data_of("squad", tmp_path, rows_with_change(**fields), bad_answers="skip")
        assert (
            len(data.train) == 5
            and data.metadata["skipped_answers"] == 1
            and "1 row skipped" in data.metadata["warnings"][0]
        )


def test_long_questions_are_truncated_and_counted(tokenizers, tmp_path):
    data = data_of("squad", tmp_path, question_tokens=4)
    examples = examples_of(learner_of(data, "bert", tokenizers), data.train, 48)
    assert examples.metadata()["cut_questions"] == 6 and examples.metadata()["longest"] <= 48
