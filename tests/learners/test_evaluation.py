"""A held-out split that several processes score together: each has the scores of one process, bit by bit."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.errors import NotFinite
from lmtool.learners.evaluation import evaluate
from lmtool.learners.mixed_sources import predictors_of, scorer_of
from tests.breadth import slow_but
from tests.distillation.test_every_kind import TASKS, corpora
from tests.learners.test_mixed_sources import CASES, built

SIZES = (2, 7)
KINDS = [kind for kind in TASKS if kind != "text_to_text"]  # its examples do not hold the labels as they were


class Threads:
    """A group of threads in the place of processes: what they hand each other is pickled."""

    rank = 0

    def __init__(self, size):
        self.size, self.here = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def of(self, rank):
        member = copy.copy(self)
        member.rank = rank
        return member

    def all(self, value):
        self.here[self.rank] = pickle.dumps(value)
        self.barrier.wait()
        values = [pickle.loads(content) for content in self.here]
        self.barrier.wait()
        return values


def shared(size, scored):
    """What scored(group) gives in each of so many processes."""
    group = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: scored(group.of(rank)), range(size)))


@pytest.mark.parametrize("case", slow_but(["mlm nsp", "mixture"], CASES))
def test_texts(case):
    torch.set_num_threads(1)
    learner, data, examples = built(case, split="validation")
    learner.eval()
    loader = PackedLoader(examples, seed=1, batch_tokens=200, shuffle=False)
    assert len(list(loader.epoch_batches())) % 7
    predictors = predictors_of(learner, data, examples)

    def scored(group=None):
        scorer = scorer_of(learner, data, examples, predictors)
        return evaluate(learner, scorer, loader.epoch_batches(), **({} if group is None else {"group": group}))

    alone = scored()
    for size in SIZES:
        assert [each.metrics() for each in shared(size, scored)] == [alone.metrics()] * size


@pytest.fixture(scope="module")
def tokens():
    kinds = {"bert": "wordpiece", "gpt": "bytebpe", "t5": "t5", "bart": "roberta"}
    return {family: corpora.tokenizer(kind) for family, kind in kinds.items()}


def task_of(kind, tokens, folder):
    """The learner of a kind, and what gives the evaluation of its rows in one of several processes."""
    learner, examples = TASKS[kind](folder, tokens)
    data = SplitData("dev", rows={learner.config.name: examples.rows})
    examples = learner.examples(data, 32)
    loader = PackedLoader(examples, seed=0, batch_examples=3, shuffle=False)

    def scored(group=None, view=None):
        own = view or copy.deepcopy(learner.eval())
        scorer = own.scorer(data, examples, {})
        return evaluate(own, scorer, loader.epoch_batches(), **({} if group is None else {"group": group}))

    return learner, scored


@pytest.mark.parametrize("kind", slow_but(["classification", "tokens"], KINDS))
def test_rows(kind, tokens, tmp_path):
    torch.set_num_threads(1)
    _, scored = task_of(kind, tokens, tmp_path)
    alone = scored()
    for size in SIZES:
        for evaluation in shared(size, scored):
            assert evaluation.metrics() == alone.metrics() and evaluation.warnings == alone.warnings
            assert list(evaluation.records()) == list(alone.records())


def test_what_is_not_finite_ends_all(tokens, tmp_path):
    """One process alone meets it; all say the same, and of which batch."""
    learner, scored = task_of("classification", tokens, tmp_path)
    place = learner.backbone.embed.token.weight.data
    place[learner.tokenizer.encode("dull")[0]] = torch.nan
    with pytest.raises(NotFinite) as alone:
        scored()

    def failed(group):
        with pytest.raises(NotFinite) as caught:
            scored(group)
        return caught.value

    for problem in shared(2, failed):
        assert problem.message == alone.value.message
        assert problem.batch.rows.tolist() == alone.value.batch.rows.tolist()
