"""Zero-shot and few-shot evaluation with prompts: scores, demonstrations, generation and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from task_fixtures import CONF, TEXTS, task_config
from task_fixtures import backbone as tiny
from task_fixtures import tokenizer as vocabulary

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.writing import writer_of
from lmtool.models.heads.lm import lm_head
from lmtool.tasks.configs.base import ANSWER, placeholders
from lmtool.tasks.loading import load_task
from lmtool.tasks.prompting.few_shot import FewShot, Prompts, demonstrations, row_values
from lmtool.tasks.prompting.pattern import PromptTemplate
from lmtool.types import Packed
from tests.objectives.objective_fixtures import backbone as small
from tests.objectives.objective_fixtures import tokenizer as small_vocabulary

LABELS = ("negative", "positive")
PROMPT = {"template": "Review: {sentence}\nSentiment: {label}", "words": {}}


@pytest.fixture(scope="module")
def gpt():
    model, tokens = tiny("gpt", max_positions=200).eval(), vocabulary("bytebpe")
    return writer_of(model, lm_head(model).eval(), tokens)


@pytest.fixture(scope="module")
def t5():
    model, tokens = small("t5", max_positions=200).eval(), small_vocabulary("t5")
    head = lm_head(model)
    model.initialize(head, 0, "heads.lm.")
    return writer_of(model, head.eval(), tokens)


def data_of(folder, name="sst2", train=8, **overrides):
    """Rows with distinct texts, except one held-out row that is also in train."""
    rows = [{"sentence": f"{TEXTS[n % 8]} {n}", "label": LABELS[n % 2]} for n in range(train + 4)]
    overrides = {"prompt": {**PROMPT}, **overrides} if name == "sst2" else overrides
    if name == "copa":
        rows = [
            {"premise": f"{row['sentence']}.", "question": ("cause", "effect")[n % 2], "choice1": f"one {n}",
             "choice2": f"two {n}", "label": n % 2} for n, row in enumerate(rows)
        ]  # fmt: skip
    if name == "tatoeba":
        rows = [{"en": row["sentence"], "de": f"das {n}"} for n, row in enumerate(rows)]
        overrides = {"header": None, **overrides}
    for split, part in (("train", rows[:train]), ("dev", [rows[0], *rows[train:]])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return load_task(task_config(name, path=folder, **overrides), 0, folder / "cache", True)


def reference_log_prob(writer, text, answer):
    """The summed log-probability of an answer's tokens, and their number, by one forward over the whole text."""
    prompt, ids = writer.encode(text).tolist(), writer.encode(answer).tolist()
    packed = Packed(torch.tensor([*prompt, *ids]), (len(prompt) + len(ids),))
    with torch.no_grad():
        model = writer.model
        log_probs = model.head(model.backbone(packed), model.backbone.embed.token.weight).log_softmax(-1)
    return sum(float(log_probs[len(prompt) - 1 + at, token]) for at, token in enumerate(ids)), len(ids)


def softmax(scores):
    fractions = np.exp(np.array(scores) - max(scores))
    return fractions / fractions.sum()


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("normalisation", ["none", "length", "calibrated"])
def test_label_word_scores_match_plain_forward(gpt, tmp_path, shots, normalisation):
    data = data_of(tmp_path, prompt__words={"negative": "bad", "positive": "very good"})
    kind, dev = build(data.config), data.validation["dev"]
    shown = demonstrations(kind, data.train, [dev], shots, 1)
    evaluation = FewShot(kind, gpt, 200, normalisation, 150).evaluate(shown, dev)
    demos = [
        f"Review: {text}\nSentiment: {('bad', 'very good')[label]}"
        for text, label in zip(shown.columns["sentence"], shown.labels, strict=True)
    ]
    lengths = set()
    for text, prediction in zip(dev.columns["sentence"], evaluation.predictions, strict=True):

        def scores(text):
            prompt = "\n\n".join([*demos, f"Review: {text}\nSentiment:"])
            return [reference_log_prob(gpt, prompt, answer) for answer in (" bad", " very good")]

        sums = [total for total, _ in scores(text)]
        counts = [count for _, count in scores(text)]
        lengths |= set(counts)
        if normalisation == "length":
            sums = [total / count for total, count in zip(sums, counts, strict=True)]
        if normalisation == "calibrated":
            nothing = [softmax([total for total, _ in scores(given)]) for given in ("N/A", "[MASK]", "")]
            sums = list(np.array(sums) - np.log(np.mean(nothing, axis=0)))
        np.testing.assert_allclose(prediction.probabilities, softmax(sums), atol=1e-4)
        assert prediction.value == int(np.argmax(sums))
    assert len(lengths) == 2  # the words differ in length, so that normalization matters
    assert evaluation.scores["accuracy"] == np.mean(
        [row.value == label for row, label in zip(evaluation.predictions, dev.labels, strict=True)]
    )
    assert evaluation.prompt == "\n\n".join([*demos, f"Review: {dev.columns['sentence'][0]}\nSentiment:"])
    assert (evaluation.shown == shots).all()


def test_choices_are_scored_after_question(gpt, tmp_path):
    data = data_of(tmp_path, "copa")
    kind, dev = build(data.config), data.validation["dev"]
    evaluation = FewShot(kind, gpt, 200).evaluate(demonstrations(kind, data.train, [dev], 0, 0), dev)
    wordings = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
    for number, prediction in enumerate(evaluation.predictions):
        row = {name: texts[number] for name, texts in dev.columns.items()}
        prompt = f"{row['premise']} {wordings[row['question']]}"
        scores = [reference_log_prob(gpt, prompt, f" {row[name]}") for name in ("choice1", "choice2")]
        expected = softmax([total / count for total, count in scores])
        np.testing.assert_allclose(prediction.probabilities, expected, atol=1e-4)


def test_text_after_answer_is_scored(gpt, tmp_path):
    data = data_of(tmp_path, prompt__template="{label}: {sentence}")
    kind, dev = build(data.config), data.validation["dev"]
    few_shot = FewShot(kind, gpt, 200, "none")
    prediction = few_shot.evaluate(demonstrations(kind, data.train, [dev], 0, 0), dev).predictions[0]
    # An empty prompt is replaced by the end-of-text token.
    text = dev.columns["sentence"][0]
    ids = [gpt.encode(f"{label}: {text}").tolist() for label in LABELS]
    packed = [Packed(torch.tensor([gpt.model.ends[0], *own]), (len(own) + 1,)) for own in ids]
    with torch.no_grad():
        log_probs = [
            gpt.model.head(gpt.model.backbone(own), gpt.model.backbone.embed.token.weight).log_softmax(-1)
            for own in packed
        ]
    sums = [
        sum(float(rows[at, token]) for at, token in enumerate(own)) for rows, own in zip(log_probs, ids, strict=True)
    ]
    np.testing.assert_allclose(prediction.probabilities, softmax(sums), atol=1e-4)


def test_encoder_decoder_scores_target(t5, tmp_path):
    data = data_of(tmp_path)
    kind, dev = build(data.config), data.validation["dev"]
    shown = demonstrations(kind, data.train, [dev], 1, 0)
    evaluation = FewShot(kind, t5, 200, "none").evaluate(shown, dev)
    prompts = Prompts(kind, PromptTemplate(kind.config.template), t5, shown, 200)
    for values, prediction in zip(row_values(kind, dev), evaluation.predictions, strict=True):
        ids = [*prompts._shared[1], *t5.encode(f"\n\nReview: {values['sentence']}\nSentiment:").tolist()]
        inputs = t5.encode_with_template(np.array(ids))
        assert inputs[-1] == t5.tokenizer.role("eos")
        sums = []
        for word in LABELS:
            target = t5.encode(f" {word}").tolist()
            outputs = Packed(torch.tensor([t5.model.start, *target[:-1]]), (len(target),))
            with torch.no_grad():
                hidden = t5.model.backbone(Packed(torch.tensor(inputs), (len(inputs),)), None, outputs)
                log_probs = t5.model.head(hidden, t5.model.backbone.embed.token.weight).log_softmax(-1)
            sums.append(sum(float(log_probs[at, token]) for at, token in enumerate(target)))
        np.testing.assert_allclose(prediction.probabilities, softmax(sums), atol=1e-4)


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_generation_stops_at_end_of_line(gpt, t5, family, tmp_path, monkeypatch):
    data = data_of(tmp_path, "tatoeba", generation__max_new_tokens=6)
    kind, dev, writer = build(data.config), data.validation["dev"], {"gpt": gpt, "t5": t5}[family]
    shown = demonstrations(kind, data.train, [dev], 2, 0)
    read = []
    monkeypatch.setattr(
        writer,
        "write",
        lambda prompts, *more: [read.append(prompt) or [number] for number, prompt in enumerate(prompts)],
    )
    monkeypatch.setattr(writer, "text", lambda prompt, new: f" das {[0, 8, 9, 10, 11][new[0]]}\nEnglish: x")
    evaluation = FewShot(kind, writer, 200).evaluate(shown, dev)
    assert evaluation.scores["exact_match"] == 1.0
    assert [prediction.value for prediction in evaluation.predictions][:2] == ["das 0", "das 8"]
    monkeypatch.undo()
    ends = FewShot(kind, writer, 200)._line_ends()
    assert [writer.tokenizer.decode([end]) for end in ends] == (["\n"] if family == "gpt" else [])
    text = writer.tokenizer.decode(read[0])
    assert text.count("German:") == 3 or family == "t5"
    assert len(FewShot(kind, writer, 200).evaluate(shown, dev).predictions) == len(dev)


def test_demonstrations_are_seeded_and_never_held_out(tmp_path):
    data = data_of(tmp_path)
    kind, dev = build(data.config), data.validation["dev"]
    draws = [demonstrations(kind, data.train, [dev], 7, seed).columns["sentence"] for seed in range(4)]
    assert all(len(set(draw)) == 7 and not {*draw} & {*dev.columns["sentence"]} for draw in draws)
    assert len({tuple(draw) for draw in draws}) == 4 and len({frozenset(draw) for draw in draws}) == 1
    assert draws[2] == demonstrations(kind, data.train, [dev], 7, 2).columns["sentence"]
    with pytest.raises(UserError, match="shots=8 is more than the 7 training rows .* in no held-out row"):
        demonstrations(kind, data.train, [dev], 8, 0)


def test_oldest_demonstrations_are_dropped_first(gpt, tmp_path):
    data = data_of(tmp_path)
    kind, dev = build(data.config), data.validation["dev"]
    shown = demonstrations(kind, data.train, [dev], 4, 0)
    prompts = Prompts(kind, PromptTemplate(kind.config.template), gpt, shown, 200)
    values = row_values(kind, dev)[0]
    complete = prompts.question(values, 1, ("dev", 1))
    assert complete.shown == 4 and gpt.tokenizer.decode(complete.tokens) == prompts.text(values)
    short = Prompts(kind, PromptTemplate(kind.config.template), gpt, shown, len(complete.tokens))
    fewer = short.question(values, 1, ("dev", 1))
    assert fewer.shown == 3
    last = shown.take(np.arange(1, 4))
    assert (
        fewer.tokens
        == Prompts(kind, PromptTemplate(kind.config.template), gpt, last, 200).question(values, 1, ("", 1)).tokens
    )
    assert short.question(values, 0, ("dev", 1)).shown == 4
    evaluation = FewShot(kind, gpt, len(complete.tokens)).evaluate(shown, dev)
    assert set(evaluation.shown.tolist()) <= {3, 4} and min(evaluation.shown) == 3 and evaluation.shots == 4
    needed = r"dev.jsonl:7: the prompt needs \d+ tokens even without demonstrations, and its answer 3; the limit is 9"
    with pytest.raises(UserError, match=needed):
        Prompts(kind, PromptTemplate(kind.config.template), gpt, shown, 9).question(values, 3, ("dev.jsonl", 7))


def test_templates_keep_whitespace_with_following_text():
    template = PromptTemplate("{a}\nis {label}, says {b}")
    values = {"a": "x {b}", "b": "y"}
    assert (template.before(values), template.answer("fine", values)) == ("x {b}\nis", " fine, says y")
    assert template.example("fine", values) == "x {b}\nis fine, says y" and template.stop(values) == ", says y"
    assert PromptTemplate("Q: {a} A: {label}").stop(values) == "\n"
    typed = task_config("sst2", prompt__template="{sentence}\\n{label}")
    assert typed.template == "{sentence}\n{label}" and typed.model_validate(typed.model_dump()) == typed


SHIPPED = [path.stem for path in sorted(CONF.glob("*.yaml")) if "\nprompt:" in path.read_text()]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_prompts_name_columns_and_classes(name):
    config = task_config(name, path="x")
    assert {*placeholders(config.template)} <= {*config.reads, ANSWER} and config.template_problem("task") is None
    words = config.prompt.words
    if words:
        assert list(words) == list(config.labels)
        assert len(set(words.values())) == len(words), "each class has its own word"


def test_at_least_16_tasks_have_a_prompt():
    assert len(SHIPPED) >= 16


def test_invalid_prompts_are_refused(gpt, tmp_path):
    cases = [
        ({"prompt__template": "{sentense} {label}"}, "did you mean {sentence}"),
        ({"prompt__words": {"nice": "x"}}, "names 'nice'"),
        ({"prompt__words": {"negative": "positive"}}, "two classes have the same word"),
        ({"prompt__words": {"negative": ""}, "prompt__template": "{sentence}{label}"}, "has no tokens"),
    ]
    for overrides, message in cases:
        data = data_of(tmp_path, **overrides)
        kind = build(data.config)
        with pytest.raises(UserError) as error:
            FewShot(kind, gpt, 200).evaluate(data.train.take(np.zeros(0, int)), data.validation["dev"])
        assert message in f"{error.value.message} {error.value.hint}"
    with pytest.raises(UserError, match="reads a column called label"):
        FewShot(build(task_config("classification", path="x", text=["label"], label="class")), gpt, 200)
    with pytest.raises(UserError, match="has no prompts"):
        FewShot(build(task_config("stsb", path="x")), gpt, 200)
    for template in ("no answer", "{label} {label}", "{label:3}", "{label"):
        with pytest.raises(ValueError, match="template|brace|'}'"):
            task_config("sst2", prompt__template=template)
