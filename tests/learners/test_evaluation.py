"""Distributed evaluation of a held-out split: every rank has the scores of a single process, bit for bit."""

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
KINDS = [kind for kind in TASKS if kind != "text_to_text"]  # its examples do not hold the original labels


class Threads:
    """A group of threads instead of processes; they exchange pickled values."""

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


def on_every_rank(size, scored):
    """The result of scored(group) on each rank of a group of that size."""
    group = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: scored(group.of(rank)), range(size)))


@pytest.mark.parametrize("case", slow_but(["mlm nsp", "mixture"], CASES))
def test_ranks_score_texts_like_a_single_process(case):
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
        assert [each.metrics() for each in on_every_rank(size, scored)] == [alone.metrics()] * size


@pytest.fixture(scope="module")
def tokens():
    kinds = {"bert": "wordpiece", "gpt": "bytebpe", "t5": "t5", "bart": "roberta"}
    return {family: corpora.tokenizer(kind) for family, kind in kinds.items()}


def task_of(kind, tokens, folder):
    """The learner of a kind, and a function that evaluates its rows on one rank of a group."""
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
def test_ranks_score_rows_like_a_single_process(kind, tokens, tmp_path):
    torch.set_num_threads(1)
    _, scored = task_of(kind, tokens, tmp_path)
    alone = scored()
    for size in SIZES:
        for evaluation in on_every_rank(size, scored):
            assert evaluation.metrics() == alone.metrics() and evaluation.warnings == alone.warnings
            assert list(evaluation.records()) == list(alone.records())


def test_non_finite_loss_ends_all_ranks(tokens, tmp_path):
    """Only one rank meets the batch; all ranks report the same message and batch."""
    learner, scored = task_of("classification", tokens, tmp_path)
    place = learner.backbone.embed.token.weight.data
    place[learner.tokenizer.encode("dull")[0]] = torch.nan
    with pytest.raises(NotFinite) as alone:
        scored()

    def failed(group):
        with pytest.raises(NotFinite) as caught:
            scored(group)
        return caught.value

    for problem in on_every_rank(2, failed):
        assert problem.message == alone.value.message
        assert problem.batch.rows.tolist() == alone.value.batch.rows.tolist()
