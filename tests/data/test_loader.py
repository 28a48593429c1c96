from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from lmtool import types
from lmtool.data import examples as examples_module
from lmtool.data.examples import Plan, batch_boundaries
from lmtool.data.loader import PackedLoader, prefetch
from lmtool.errors import UserError

from .data_fixtures import DrawnExamples


def first_steps(loader: PackedLoader, count: int, cursor: dict[str, int] | None = None) -> list[types.Step]:
    return list(itertools.islice(loader.steps(cursor), count))


def contents(step: types.Step) -> tuple[list[int], list[int]]:
    examples = [number for batch in step.batches for number in batch.examples.tolist()]
    return examples, [token for batch in step.batches for token in batch.inputs.tokens.tolist()]


SIZES = [{"batch_examples": 7}, {"batch_tokens": 50}]


@pytest.mark.parametrize("size", SIZES)
def test_each_epoch_reads_every_example_once(size):
    loader = PackedLoader(DrawnExamples(100), 3, **size)
    assert isinstance(loader, types.Loader)
    orders = []
    steps = iter(loader.steps(None))
    for epoch in range(3):
        read = [contents(next(steps))[0] for _ in range(loader.steps_in_epoch(epoch))]
        flat = [number for step in read for number in step]
        assert sorted(flat) == list(range(100))
        orders.append(flat)
    assert orders[0] != orders[1] != orders[2] and orders[0] != list(range(100))
    again = PackedLoader(DrawnExamples(100), 4, **size)
    assert contents(first_steps(again, 1)[0])[0] != orders[0][: len(contents(first_steps(again, 1)[0])[0])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("micro", [1, 13, 40])
def test_micro_batches_keep_examples_and_cursors(size, micro):
    whole = first_steps(PackedLoader(DrawnExamples(60), 1, **size), 40)
    split = first_steps(PackedLoader(DrawnExamples(60), 1, **size, micro_batch_tokens=micro), 40)
    assert [contents(step) for step in whole] == [contents(step) for step in split]
    assert [step.cursor for step in whole] == [step.cursor for step in split]
    for step in split:
        for batch in step.batches:
            assert sum(batch.inputs.lengths) <= micro or len(batch.inputs.lengths) == 1


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_share_the_examples_of_each_step(size, ranks):
    """One rank reads each example of a step, cursors equal those of one process, and ranks end an epoch together."""
    alone = first_steps(PackedLoader(DrawnExamples(60), 1, **size), 40)
    loader = PackedLoader(DrawnExamples(60), 1, **size)
    fractions = [list(itertools.islice(loader.steps(None, rank, ranks), 40)) for rank in range(ranks)]
    for step, *parts in zip(alone, *fractions, strict=True):
        read = [contents(part)[0] for part in parts]
        assert sorted(sum(read, [])) == sorted(contents(step)[0])
        assert max(map(len, read)) - min(map(len, read)) <= 1
        assert {str(part.cursor) for part in parts} == {str(step.cursor)}


@pytest.mark.parametrize("size", SIZES)
def test_loader_resumes_from_cursor(size):
    steps = first_steps(PackedLoader(DrawnExamples(50), 9, **size), 30)
    for number in (0, 4, 7, 8, 15, 28):
        resumed = first_steps(PackedLoader(DrawnExamples(50), 9, **size), 29 - number, steps[number].cursor)
        assert [contents(step) for step in resumed] == [contents(step) for step in steps[number + 1 :]]
        assert [(step.cursor, step.epoch) for step in resumed] == [
            (step.cursor, step.epoch) for step in steps[number + 1 :]
        ]


def test_cursor_and_epoch_advance_at_epoch_boundary():
    loader = PackedLoader(DrawnExamples(14), 0, batch_examples=7)
    first, second, third = first_steps(loader, 3)
    assert (first.cursor, first.epoch) == ({"epoch": 0, "batch": 1}, 0.5)
    assert (second.cursor, second.epoch) == ({"epoch": 1, "batch": 0}, 1.0)
    assert (third.cursor, third.epoch) == ({"epoch": 1, "batch": 1}, 1.5)
    # A cursor after the last step of an epoch equals one at the start of the next epoch.
    assert contents(first_steps(loader, 1, {"epoch": 0, "batch": 2})[0]) == contents(third)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [(0, 0), (1, 20)])
def test_after_returns_cursor_of_step(size, start):
    """Also within an epoch, and for a loader that starts mid-epoch, as in a phase."""
    loader = PackedLoader(DrawnExamples(50), 9, **size).starting_at(*start)
    first = {"epoch": start[0], "batch": 0}
    cursors = [first, *(step.cursor for step in first_steps(loader, 30, first))]
    assert len({cursor["epoch"] for cursor in cursors}) > 2, "several epochs"
    assert [loader.after(steps) for steps in range(31)] == cursors


def test_cursor_beyond_epoch_is_refused():
    loader = PackedLoader(DrawnExamples(14), 0, batch_examples=7)
    with pytest.raises(UserError, match="at batch 9, but an epoch has 2"):
        loader.steps({"epoch": 0, "batch": 9})


def test_batch_tokens_limits_each_step():
    loader = PackedLoader(DrawnExamples(200, longest=30), 2, batch_tokens=64)
    tokens = [sum(batch.tokens for batch in step.batches) for step in first_steps(loader, loader.steps_in_epoch(0))]
    assert max(tokens) <= 64 and np.mean(tokens[:-1]) > 45
    small = PackedLoader(DrawnExamples(20, longest=30), 2, batch_tokens=3)
    assert all(len(step.batches[0].inputs.lengths) >= 1 for step in first_steps(small, 20))


def test_virtual_tokens_count_only_in_micro_batches():
    plain = PackedLoader(DrawnExamples(60), 3, None, 100, 40)
    loader = PackedLoader(DrawnExamples(60), 3, None, 100, 40, virtual_tokens=6)
    both = first_steps(loader, 5), first_steps(plain, 5)
    assert [contents(step) for step in both[0]] == [contents(step) for step in both[1]]
    forwards = [batch.inputs.lengths for step in both[0] for batch in step.batches]
    assert max(sum(lengths) + 6 * len(lengths) for lengths in forwards if len(lengths) > 1) <= 40
    assert len(forwards) > sum(len(step.batches) for step in both[1])
    scored = [
        batch.inputs.lengths for batch in PackedLoader(DrawnExamples(60), 3, None, 40, virtual_tokens=6).epoch_batches()
    ]
    assert max(sum(lengths) + 6 * len(lengths) for lengths in scored if len(lengths) > 1) <= 40


def test_unshuffled_order_is_the_plan():
    loader = PackedLoader(DrawnExamples(20), 2, batch_examples=6, shuffle=False)
    assert [contents(step)[0] for step in first_steps(loader, 4)] == [
        list(range(6)), list(range(6, 12)), list(range(12, 18)), [18, 19],
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_batches_are_sorted_by_length(size):
    loader = PackedLoader(DrawnExamples(45), 2, **size, micro_batch_tokens=30)
    batches = list(loader.epoch_batches())
    assert sorted(number for batch in batches for number in batch.examples.tolist()) == list(range(45))
    lengths = [length for batch in batches for length in batch.inputs.lengths]
    assert lengths == sorted(lengths, reverse=True)
    assert all(batch.tokens <= 30 for batch in batches)


def test_loader_metadata_counts_examples_and_padding():
    examples = DrawnExamples(100)
    metadata = PackedLoader(examples, 0, batch_examples=10).metadata()
    lengths = examples.plan(0).lengths
    assert metadata["examples"] == 100 and metadata["steps_per_epoch"] == 10
    assert metadata["tokens_per_epoch"] == lengths.sum() and metadata["longest"] == lengths.max()
    assert metadata["padding_fraction"] == 0 and 0.2 < metadata["padding_avoided"] < 0.8
    assert metadata["truncated_fraction"] == 0.25


def test_loader_without_examples_is_refused():
    loader = PackedLoader(DrawnExamples(0), 0, batch_examples=10)
    with pytest.raises(UserError, match="no examples"):
        loader.steps(None)


def test_loader_needs_exactly_one_batch_size():
    with pytest.raises(ValueError):
        PackedLoader(DrawnExamples(3), 0)
    with pytest.raises(ValueError):
        PackedLoader(DrawnExamples(3), 0, batch_examples=2, batch_tokens=9)


def test_plans_are_cached_per_epoch():
    examples = DrawnExamples(30)
    loader = PackedLoader(examples, 0, batch_examples=10)
    first_steps(loader, 3)
    loader.metadata(), loader.steps_in_epoch(0)
    assert examples.plans <= 2  # the thread may have started the next epoch


def test_batch_boundaries_of_a_million_examples_are_fast():
    lengths = 1 + np.random.default_rng(0).integers(0, 128, size=1_000_000)
    began = time.perf_counter()
    boundaries = batch_boundaries(lengths, tokens=4096)
    assert time.perf_counter() - began < 3
    sums = np.add.reduceat(lengths, boundaries[:-1])
    assert sums.max() <= 4096 and (sums[:-1] + lengths[boundaries[1:-1]] > 4096).all()
    assert boundaries[0] == 0 and boundaries[-1] == len(lengths)


def test_order_does_not_depend_on_block_size(monkeypatch):
    whole = [
        step.batches[0].examples.tolist()
        for step in first_steps(PackedLoader(DrawnExamples(100), 4, batch_examples=9), 8)
    ]
    monkeypatch.setattr(examples_module, "_BLOCK", 7)
    examples_module._permuted_block.cache_clear()
    loader = PackedLoader(DrawnExamples(100), 4, batch_examples=9)
    assert [step.batches[0].examples.tolist() for step in first_steps(loader, 8)] == whole
    examples_module._permuted_block.cache_clear()


def test_batch_boundaries_respect_examples_and_tokens():
    assert batch_boundaries(np.array([1, 1, 1, 9, 1]), examples=2, tokens=5).tolist() == [0, 2, 3, 4, 5]
    assert batch_boundaries(np.array([], dtype=np.int64), tokens=5).tolist() == [0]
    assert batch_boundaries(np.array([3, 3])).tolist() == [0, 2]


def test_plan_with_unequal_lengths_is_refused():
    with pytest.raises(ValueError):
        Plan(np.zeros(3), np.zeros(2))


def threads() -> int:
    return sum(thread.name == "lmtool-prefetch" for thread in threading.enumerate())


def test_prefetch_keeps_order_and_ends_its_thread():
    assert list(prefetch(iter(range(100)))) == list(range(100))
    assert threads() == 0


def test_closed_prefetch_ends_its_thread():
    things = prefetch(itertools.count())
    assert [next(things) for _ in range(3)] == [0, 1, 2]
    assert threads() == 1
    things.close()
    assert threads() == 0


def test_prefetch_reads_ahead():
    drawn = []
    things = prefetch((drawn.append(number) or number for number in range(10)), ahead=2)
    assert next(things) == 0
    deadline = time.time() + 5
    while len(drawn) < 4 and time.time() < deadline:
        time.sleep(0.01)
    assert len(drawn) == 4  # one returned, two queued, one being computed
    things.close()


def test_prefetch_raises_errors_in_the_reader():
    def broken():
        yield 1
        raise UserError("bad line", "mend it")

    things = prefetch(broken())
    assert next(things) == 1
    with pytest.raises(UserError, match="bad line"):
        next(things)
    assert threads() == 0


def test_single_batch_is_read_without_thread():
    few, many = (PackedLoader(DrawnExamples(count), 0, batch_examples=5) for count in (5, 50))
    before = threads()
    for loader, running in ((few, before), (many, before + 1)):
        batches = loader.epoch_batches()
        assert len(next(batches).examples) == 5 and threads() == running
        batches.close()
