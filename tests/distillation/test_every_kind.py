"""Hard and soft targets for every objective and task kind: losses of a student that equals its teacher, counts, and
sums over micro-batches."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.data.examples import SplitData, unlabeled_name
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.configs.terms import HardConfig, SoftConfig
from lmtool.distillation.recording import StudentData, Teacher, record
from lmtool.distillation.standard import Standard
from lmtool.distillation.teachers import HardLabels
from lmtool.learners.configs import MixtureConfig
from lmtool.objectives.configs import (
    ClmConfig,
    DenoisingConfig,
    MlmConfig,
    PrefixLmConfig,
    SpanConfig,
    SpanCorruptionConfig,
)
from lmtool.tasks.loading import load_task, target_rows
from lmtool.training.precision import Precision
from tests.objectives import objective_fixtures as corpora
from tests.tasks.task_fixtures import TEXTS, singles, table, task_config
from tests.tasks.token_fixtures import conll, tagged

STILL = {"dropout": 0.0, "num_layers": 1}
FP32 = Precision("fp32", torch.device("cpu"), "")
NOT_LEARNED = {"domain": {"classification_domain"}}
"""Terms that have no teacher targets."""


def objective(config, family):
    def made(folder, tokens):
        more = {"activation_dropout": 0.0} if family == "bart" else {}
        learner = build(config, corpora.backbone(family, **STILL, **more), tokens[family], 3)
        return learner, learner.examples(corpora.split(corpora.store(tokens[family])), 32)

    return made


OBJECTIVES = {
    "mlm": objective(MlmConfig(), "bert"),
    "nsp": objective(MlmConfig(pairs="nsp"), "bert"),
    "span with sop": objective(SpanConfig(pairs="sop"), "bert"),
    "clm": objective(ClmConfig(), "gpt"),
    "prefix_lm": objective(PrefixLmConfig(), "t5"),
    "span_corruption": objective(SpanCorruptionConfig(), "t5"),
    "denoising": objective(DenoisingConfig(), "bart"),
    "mixture": objective(MixtureConfig(members=("mlm", "span")), "bert"),
}


def task(kind, family="bert", write=lambda folder: table(folder / "train.tsv", ["text", "label"], LABELLED), **fields):
    def made(folder, tokens):
        write(folder)
        (written,) = folder.iterdir()
        shutil.copy(written, written.with_stem("dev"))
        data = load_task(task_config(kind, path=folder, validation=["dev"], **fields), 0, folder / "cache", True)
        more = {"activation_dropout": 0.0} if family == "bart" else {}
        learner = data.config.learner(corpora.backbone(family, **STILL, **more), tokens[family], 0)
        return learner, learner.examples(SplitData("train", rows={data.config.name: data.train}), 32)

    return made


LABELLED = singles(16, ["bad", "good"])
CONTEXT = "the old cat sat near a quiet river"


def objects(rows):
    return lambda folder: (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TASKS = {
    "classification": task("classification", loss__class_weights=[1.0, 3.0], loss__label_smoothing=0.1),
    "auxiliary_lm": task("classification", "gpt", auxiliary_lm=0.5),
    "text_to_text": task("classification", "t5", head="text_to_text"),
    "prompt": task("classification", head="prompt", auxiliary_mlm=0.1, prompt__words={"bad": "old", "good": "cat"}),
    "regression": task(
        "regression", write=lambda folder: table(folder / "train.tsv", ["text", "label"], singles(16, [0.5, 2.0]))
    ),
    "multi_label": task(
        "multi_label",
        write=lambda folder: table(folder / "train.tsv", ["text", "label"], singles(16, ["a", "a,b", "c"])),
    ),
    "tokens": task("token_classification", write=lambda folder: conll(folder / "train.conll", tagged(12))),
    "extractive_qa": task(
        "extractive_qa",
        write=objects(
            [
                {"id": n, "question": "who?", "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [8]}}
                for n in range(10)
            ]
        ),
    ),
    "span_classification": task(
        "span_classification",
        text=["text", "span"],
        write=objects([{"text": CONTEXT, "span": [n, n + 3], "label": "xy"[n % 2]} for n in range(0, 30, 3)]),
    ),
    "multiple_choice": task(
        "multiple_choice",
        write=objects([{"text": t, "choice1": "a fine", "choice2": t, "label": 1} for t in TEXTS * 2]),
    ),
    "seq2seq": task(
        "seq2seq",
        "bart",
        write=objects([{"source": text, "target": text} for text in TEXTS * 2]),
        metrics=["exact_match"],
        metric="exact_match",
    ),
}


def domain(folder, tokens):
    table(folder / "own.tsv", ["text", "label"], LABELLED)
    table(folder / "other.tsv", ["text"], [(text,) for text in TEXTS])
    section = {"name": "dann", "target": str(folder / "other.tsv"), "steps": 10, "hidden_size": 7}
    data = load_task(task_config("classification", path=folder / "own.tsv", domain=section), 0, folder, True)
    learner = data.config.learner(corpora.backbone("bert", **STILL), tokens["bert"], 0)
    rows = {"classification": data.train, unlabeled_name("classification"): target_rows(data.config, folder, True)}
    return learner, learner.examples(SplitData("train", rows=rows), 32)


KINDS = {**OBJECTIVES, **TASKS, "domain": domain}


@pytest.fixture(scope="module")
def tokens():
    kinds = {"bert": "wordpiece", "gpt": "bytebpe", "t5": "t5", "bart": "roberta"}
    return {family: corpora.tokenizer(kind) for family, kind in kinds.items()}


def distilled(student, teacher):
    teacher = Teacher(teacher.eval().requires_grad_(False), FP32, "runs/teacher")
    return Standard(
        StandardConfig(teacher="runs/teacher", gold=0.0, terms={"soft": SoftConfig(), "hard": HardConfig()}),
        student,
        [teacher],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_soft_and_hard_losses_of_equal_and_different_teachers(kind, tokens, tmp_path):
    learner, examples = KINDS[kind](tmp_path, tokens)
    rows = examples.plan(0).rows
    numbers = np.linspace(0, len(rows) - 1, 8).astype(int)  # some of each member of a mixture
    whole, *parts = (examples.batch(rows[some], some, 0) for some in (numbers, numbers[:4], numbers[4:]))
    learner.eval()
    pupil = distilled(learner, copy.deepcopy(learner)).eval()
    taught = set(learner.loss_weights) - NOT_LEARNED.get(kind, set())
    alone = len(learner.loss_weights) == 1
    titles = {term: ("soft" if alone else f"soft_{term}", "hard" if alone else f"hard_{term}") for term in taught}

    # The soft loss is 0 where the student equals its teacher.
    output, counts = pupil(whole, 1), pupil.counts(whole)
    assert {title for pair in titles.values() for title in pair} == set(output.sums)
    soft = sum(output.sums[title] for title, _ in titles.values())
    assert soft.item() == pytest.approx(0.0, abs=1e-3)
    soft.backward()
    assert max(tensor.grad.abs().max() for tensor in learner.parameters() if tensor.grad is not None) < 1e-3
    learner.zero_grad()

    # The counts are the numbers of compared predictions.
    predicted = record(learner, whole, 1).predicted
    for term, names in titles.items():
        assert {counts[name] for name in names} == {float(len(predicted[term]))} != {0.0}

    # With another teacher the loss is positive, and the parts of a batch add up to the whole.
    other, noise = copy.deepcopy(learner), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor += 0.2 * torch.randn(tensor.shape, generator=noise)
    pupil = distilled(learner, other)
    output, split = pupil(whole, 1), [pupil(part, 1).sums for part in parts]
    assert all(output.sums[name].item() > 1e-4 for name, _ in titles.values())
    for name, total in output.sums.items():
        assert sum(part[name].item() for part in split if name in part) == pytest.approx(total.item(), rel=1e-3)
        assert sum(pupil.counts(part).get(name, 0) for part in parts) == counts[name]
    sum(output.sums.values()).backward()
    assert all(tensor.grad is None for tensor in other.parameters())
    assert any(tensor.grad is not None and tensor.grad.any() for tensor in learner.backbone.parameters())


READ = ["classification", "regression", "multi_label", "tokens", "extractive_qa", "span_classification"]
"""Kinds whose labels are in files of predictions and in no input."""


@pytest.mark.parametrize("kind", [*READ, "multiple_choice", "domain"])
def test_hard_labels_of_a_file_match_their_rows(kind, tokens, tmp_path):
    """In any order of the examples, and beside any others."""
    learner, examples = KINDS[kind](tmp_path, tokens)
    source = getattr(examples, "source", examples)
    data = SplitData("train", rows={learner.config.name: source.rows})
    labels = HardLabels(learner, FP32, "said.jsonl", relabel=lambda data: (data, {"predictions": "all"}))
    reading = StudentData(data, 32, examples, None, None, None, {}, 64)
    assert labels.prepare(reading) == {"predictions": "all"}
    rows, numbers = examples.plan(0).rows, np.array([5, 0, 3])
    batch = examples.batch(rows[numbers], numbers, 0)
    (given,) = labels.predict(batch).predicted.values()
    assert torch.equal(given.best(), learner.labels(batch).flatten()) and len(given) > 2
