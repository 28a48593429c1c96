"""Assignment of a step's examples to processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lmtool import types
from lmtool.data.loader import PackedLoader, assign, local_step
from lmtool.data.phases import PhasedLoader, PhaseFractions

from .data_fixtures import DrawnExamples


def steps_of_ranks(
    loader: types.Loader, ranks: int, count: int, cursor: dict[str, int] | None = None
) -> list[list[types.Step]]:
    """The first steps of each rank."""
    return [list(itertools.islice(loader.steps(cursor, rank, ranks), count)) for rank in range(ranks)]


def example_numbers(step: types.Step) -> list[int]:
    return [number for batch in step.batches for number in batch.examples.tolist()]


@pytest.mark.parametrize("micro", [None, 30])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_ranks_together_read_the_step_of_one_process(ranks: int, micro: int | None) -> None:
    """Each example is read once, in order and with the step's cursor. All ranks run the same number of forwards, even
    if a step has fewer examples than ranks."""
    loader = PackedLoader(DrawnExamples(60), 1, batch_examples=13, micro_batch_tokens=micro)
    ((*alone,),) = steps_of_ranks(loader, 1, 12)
    assert not any(step.idle for step in alone)
    idle = 0
    for whole, *parts in zip(alone, *steps_of_ranks(loader, ranks, 12), strict=True):
        order = example_numbers(whole)
        assert sorted(number for part in parts for number in example_numbers(part)) == sorted(order)
        for part in parts:
            assert example_numbers(part) == [number for number in order if number in example_numbers(part)]
            assert (part.cursor, part.epoch) == (whole.cursor, whole.epoch)
        assert len({len(part.batches) + len(part.idle) for part in parts}) == 1
        of_idle = [batch for part in parts for batch in part.idle]
        assert all(set(batch.examples.tolist()) <= set(order) for batch in of_idle)
        idle += len(of_idle)
        if micro is not None:
            assert all(sum(batch.inputs.lengths) <= micro or len(batch.examples) == 1 for batch in whole.batches)
    assert idle or (ranks < 16 and micro is None)


def test_assignment_balances_tokens_and_examples() -> None:
    """Tokens differ by less than the longest example, and examples by at most one."""
    chance = np.random.default_rng(0)
    for _ in range(50):
        lengths, ranks = chance.integers(1, 200, chance.integers(1, 70)), int(chance.integers(2, 9))
        fractions = assign(lengths, ranks)
        tokens, counts = [int(lengths[own].sum()) for own in fractions], [len(own) for own in fractions]
        assert sorted(np.concatenate(fractions)) == list(range(len(lengths)))
        assert max(tokens) - min(tokens) <= lengths.max() and max(counts) - min(counts) <= 1


def test_virtual_tokens_count_toward_forward_limit() -> None:
    lengths = np.array([4, 4, 4, 4, 4, 4])
    assert local_step(lengths, 0, 2, 12).boundaries.tolist() == [0, 3]
    assert local_step(lengths + 4, 0, 2, 12).boundaries.tolist() == [0, 1, 2, 3]


def test_ranks_share_the_steps_of_phases() -> None:
    loaders = [PackedLoader(DrawnExamples(40), 1, batch_examples=size) for size in (6, 4)]
    loader = PhasedLoader(loaders, PhaseFractions((0.5, 0.5), (1.0, 1.0), (1.0, 1.0), (1.0, 0.5)), (True, True))
    loader.fix(8, "max_steps")
    ((*alone,),) = steps_of_ranks(loader, 1, 8)
    for whole, *parts in zip(alone, *steps_of_ranks(loader, 2, 8), strict=True):
        assert sorted(example_numbers(parts[0]) + example_numbers(parts[1])) == sorted(example_numbers(whole))
        assert {(part.phase, part.rate_scale, str(part.cursor)) for part in parts} == {
            (whole.phase, whole.rate_scale, str(whole.cursor))
        }
    assert {step.phase for step in alone} == {1, 2}
    later = alone[5].cursor
    assert [example_numbers(step) for step in steps_of_ranks(loader, 2, 2, later)[1]] == [
        example_numbers(step) for step in steps_of_ranks(loader, 2, 8)[1][6:]
    ]
