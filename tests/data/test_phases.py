"""Phases: loaders in sequence, their boundaries, their examples, and resuming from any cursor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lmtool import types
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader, PhaseFractions
from lmtool.errors import UserError

from .data_fixtures import DrawnExamples
from .test_loader import contents


def fractions(*of_budget: float, tokens: tuple[float, ...] = (1.0, 1.0)) -> PhaseFractions:
    return PhaseFractions(of_budget, tokens, tokens, (1.0, 0.5))


def phased(first: PackedLoader, second: PackedLoader, same_text: bool = True) -> PhasedLoader:
    loader = PhasedLoader([first, second], fractions(0.5, 0.5), [False, same_text])
    loader.fix(20, "max_steps")
    return loader


def first_steps(loader: PhasedLoader, count: int, cursor: dict[str, int] | None = None) -> list[types.Step]:
    return list(itertools.islice(loader.steps(cursor), count))


def examples(steps: list[types.Step]) -> list[int]:
    return [number for step in steps for number in contents(step)[0]]


@pytest.mark.parametrize(
    "budget, ends, tokens, stretch",
    [
        ("max_steps", [90, 100], 1.3, 1.0),
        ("max_tokens", [97, 100], 1 / 0.925, 0.925),
        ("max_minutes", None, None, 0.925),
    ],
)
def test_phase_fractions_apply_to_the_unit_of_the_budget(budget, ends, tokens, stretch):
    """90% of the budget at one token per step and 10% at four: 90% of the tokens are 97% of the steps."""
    of = fractions(0.9, 0.1, tokens=(1.0, 4.0))
    loader = PhasedLoader([PackedLoader(DrawnExamples(9), 0, 3)] * 2, of, [False, True])
    if ends is not None:
        assert of.last_steps(100, budget) == ends and loader.mean_tokens(budget) == pytest.approx(tokens)
        read = 1.0 * ends[0] + 4.0 * (100 - ends[0])
        assert ends[0] / (read if budget == "max_tokens" else 100) == pytest.approx(0.9, abs=0.02)
    assert loader.stretch(budget) == pytest.approx(stretch)


def test_published_phase_fractions_are_exact():
    assert fractions(0.9, 0.1).last_steps(1_000_000, "max_steps") == [900_000, 1_000_000]
    assert PhaseFractions((0.2,) * 5, (1.0,) * 5, (1.0,) * 5, (1.0,) * 5).last_steps(10, "max_steps") == [
        2,
        4,
        6,
        8,
        10,
    ]


def test_second_phase_continues_same_order():
    """10 steps of 7 and 10 steps of 3 examples read the first 100 examples of one order, each once."""
    plain = PackedLoader(DrawnExamples(100), 3, 5)
    loader = phased(PackedLoader(DrawnExamples(100), 3, 7), PackedLoader(DrawnExamples(100), 3, 3))
    steps = first_steps(loader, 20)
    assert isinstance(loader, types.Phased)
    assert examples(steps) == examples(list(itertools.islice(plain.steps(None), 20)))
    assert [step.phase for step in steps] == [1] * 10 + [2] * 10
    assert [step.rate_scale for step in steps] == [1.0] * 10 + [0.5] * 10
    assert steps[-1].epoch == 1 and steps[9].epoch == 10 / 15 and steps[10].epoch == pytest.approx(0.73)
    rows = DrawnExamples(100).plan(0).rows
    assert np.sort(np.concatenate(list(loader.rows_read(13)))).tolist() == np.sort(rows[examples(steps[:13])]).tolist()


@pytest.mark.parametrize("same_text, count", [(True, 60), (False, 100)])
def test_phase_with_other_examples_starts_new_epoch(same_text, count):
    loader = phased(PackedLoader(DrawnExamples(100), 3, 7), PackedLoader(DrawnExamples(count), 3, 7), same_text)
    alone = PackedLoader(DrawnExamples(count), 3, 7)
    steps = first_steps(loader, 20)
    assert examples(steps[10:]) == examples(list(itertools.islice(alone.steps(None), 10)))
    assert steps[10].epoch == pytest.approx(7 / count, rel=0.05)


@pytest.mark.parametrize("second", [(100, 3), (60, 7)])
def test_phases_resume_from_every_cursor(second):
    count, size = second

    def loader() -> PhasedLoader:
        return phased(PackedLoader(DrawnExamples(100), 3, 30), PackedLoader(DrawnExamples(count), 3, size))

    whole = first_steps(loader(), 30)
    for at in (0, 3, 8, 9, 10, 11, 24):
        again = first_steps(loader(), 30 - at - 1, whole[at].cursor)
        assert [(contents(step), step.cursor, step.phase, step.epoch) for step in again] == [
            (contents(step), step.cursor, step.phase, step.epoch) for step in whole[at + 1 :]
        ]


def test_first_phase_lasts_until_horizon_is_known():
    first, second = PackedLoader(DrawnExamples(100), 3, 7), PackedLoader(DrawnExamples(60), 3, 7)
    loader = PhasedLoader([first, second], fractions(0.5, 0.5), [False, True])
    steps, phases = iter(loader.steps(None)), []
    for number in range(12):
        if number == 8:
            loader.fix(4, "max_minutes")
        phases.append(next(steps).phase)
    assert phases == [1] * 8 + [2] * 4


def test_cursor_in_phase_that_starts_later_is_refused():
    """As when the budget grows after a phase boundary."""
    loader = phased(PackedLoader(DrawnExamples(100), 3, 7), PackedLoader(DrawnExamples(60), 3, 7))
    cursor = first_steps(loader, 12)[-1].cursor
    loader.fix(40, "max_steps")
    with pytest.raises(UserError, match="in phase 2 after step 12, .* starts after step 20"):
        loader.steps(cursor)


def test_phase_shorter_than_a_step_is_skipped():
    loaders = [PackedLoader(DrawnExamples(100), 3, 7) for _ in range(3)]
    loader = PhasedLoader(
        loaders, PhaseFractions((0.5, 0.01, 0.49), (1.0,) * 3, (1.0,) * 3, (1.0,) * 3), [False, True, True]
    )
    loader.fix(10, "max_steps")
    assert [step.phase for step in first_steps(loader, 10)] == [1] * 5 + [3] * 5
    assert examples(first_steps(loader, 10)) == examples(list(itertools.islice(loaders[0].steps(None), 10)))
