"""The statistics that `inspect` checks: those of every learner, and those that an objective adds."""

from __future__ import annotations

from lmtool.config.registry import build
from lmtool.learners.inspection import Inspector
from lmtool.objectives.configs import ClmConfig
from tests.objectives.objective_fixtures import backbone, split, store, tokenizer


class Everywhere(Inspector):
    """The inspector of an objective that predicts at every token."""

    def check(self, stats, drawn):
        stats.exact("predicted tokens", len(drawn.batch.targets["clm"].labels), len(drawn.batch.inputs.tokens))


def test_inspector_reports_broken_statistics():
    tokens = tokenizer("bytebpe")
    learner = build(ClmConfig(), backbone("gpt"), tokens, 0)
    examples = learner.examples(split(store(tokens)), 32)
    plain = Inspector(learner, examples, 32)
    assert not plain.measure(2000).broken() and len(list(plain.describe(3))) == 3 and not list(plain.describe(0))
    assert [statistic.name for statistic in Everywhere(learner, examples, 32).measure(2000).broken()] == [
        "predicted tokens"
    ]
    assert [statistic.name for statistic in Inspector(learner, examples, 31).measure(2000).broken()] == [
        "sequences longer than max_length"
    ]
