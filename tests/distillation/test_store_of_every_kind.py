"""Stored teacher outputs equal the teacher's predictions, for every objective and task kind."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.distillation.recording import RecordedStates, StudentData, Teacher
from lmtool.distillation.store.folder import StoreLocation
from lmtool.distillation.store.outputs import StoreFormat
from lmtool.distillation.teachers import Passes, StoredTeacher, TopWordsTeacher
from lmtool.errors import UserError
from lmtool.models.heads.predicted import TopWords
from lmtool.nn.stack import TapPoint
from lmtool.training.precision import FP32_CPU
from tests.breadth import slow_but
from tests.distillation.test_every_kind import KINDS, OBJECTIVES
from tests.distillation.test_every_kind import tokens as tokens

TEMPERATURES = (1.0, 2.0)


def stored(learner, folder, store_format, fixed=True, seed=0, states=False):
    return StoredTeacher(
        learner, FP32_CPU, "runs/teacher", location=StoreLocation(None, str(folder)), store_format=store_format,
        identity={"teacher": "x"}, fixed_examples=fixed, seed=seed, tokenizers={}, states=states,
    )  # fmt: skip


def reading(examples, **budgets):
    sizes = {"batch_examples": 4, "batch_tokens": None}
    loader = PackedLoader(examples, 5, 4)
    budgets = {"max_steps": None, "max_epochs": 1.0, **budgets}
    return StudentData(SplitData("train"), 32, examples, loader, sizes=sizes, forward_tokens=64, **budgets)


STORED = [kind for kind in KINDS if kind != "auxiliary_lm"]


@pytest.mark.parametrize("kind", slow_but({*OBJECTIVES, "classification", "tokens", "seq2seq", "domain"}, STORED))
def test_stored_outputs_equal_teacher_predictions(kind, tokens, tmp_path):
    (tmp_path / "data").mkdir()
    learner, examples = KINDS[kind](tmp_path / "data", tokens)
    learner.eval().requires_grad_(False)
    read, fixed = reading(examples), kind not in OBJECTIVES
    states = kind != "domain"  # whose forward pass composes batches differently
    whole = stored(learner, tmp_path, StoreFormat("float32", None, TEMPERATURES), fixed, states=states)
    small = stored(learner, tmp_path, StoreFormat("float16", 3, TEMPERATURES), fixed)
    assert whole.prepare(read)["teacher_outputs"] == small.prepare(read)["teacher_outputs"] == "made"
    assert whole.prepare(read)["teacher_outputs"] == "found"
    live, cut = (
        Teacher(learner, FP32_CPU, ""),
        TopWordsTeacher(learner, FP32_CPU, "", top_k=3, temperatures=TEMPERATURES),
    )
    # Bit for bit on the batches of the storing pass.
    batch = next(iter(Passes.from_student(read, fixed, 0).batches()))
    same(whole.predict(batch).predicted, live.predict(batch).predicted, 0.0)
    batch = next(iter(read.loader.steps(None))).batches[0]
    places = [TapPoint(depth, side) for side, depth in learner.backbone.config.depths.items()]
    there, here = RecordedStates(states=places), RecordedStates(states=places)
    same(whole.predict(batch, there).predicted, live.predict(batch, here).predicted, 1e-5)
    for place, kept in here.states.items() if states else ():
        assert kept and len(kept) == len(there.states[place])
        for tensor, other in zip(there.states[place], kept, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)
    same(small.predict(batch).predicted, cut.predict(batch).predicted, 2e-3)


def same(stored, live, tolerance):
    assert stored.keys() == live.keys() and stored
    for term, probabilities in live.items():
        assert (
            len(stored[term]) == len(probabilities)
            and type(stored[term]) is not TopWords
            or type(probabilities) is TopWords
        )
        for temperature in TEMPERATURES:
            there = stored[term].probabilities(temperature)
            torch.testing.assert_close(there, probabilities.probabilities(temperature), rtol=tolerance, atol=tolerance)


def test_storing_predictions_without_targets_is_refused(tokens, tmp_path):
    learner, examples = KINDS["auxiliary_lm"](tmp_path, tokens)  # batches lack targets of its language model
    with pytest.raises(UserError, match="predictions of lm cannot be stored"):
        stored(learner.eval(), tmp_path, StoreFormat("float32", None, TEMPERATURES)).prepare(reading(examples))


def test_examples_outside_the_store_are_refused(tokens, tmp_path):
    learner, examples = KINDS["mlm"](tmp_path, tokens)
    teacher = stored(learner.eval(), tmp_path, StoreFormat("float32", None, TEMPERATURES), fixed=False)
    with pytest.raises(UserError, match="neither max_steps nor max_epochs"):
        teacher.prepare(reading(examples, max_epochs=None))
    teacher.prepare(reading(examples, max_steps=1))
    first, second = (step.batches[0] for step in islice(PackedLoader(examples, 5, 4).steps(None), 2))
    teacher.predict(first)
    with pytest.raises(UserError, match="for examples that this run reads"):
        teacher.predict(second)
