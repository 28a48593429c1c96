"""Lanes of joined text: every token is read once and each lane is contiguous, for all step and forward sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.data.examples import Plan
from lmtool.data.loader import PackedLoader, segments
from lmtool.errors import UserError
from lmtool.types import Batch, Lanes, Packed


@pytest.mark.parametrize(("places", "lanes", "size"), [(100, 4, 10), (103, 4, 10), (7, 3, 8), (1, 1, 8), (50, 7, 7)])
def test_segments_cover_text_in_contiguous_lanes(places: int, lanes: int, size: int) -> None:
    rows = segments(places, lanes, size)
    assert rows["length"].min() > 0 and rows["length"].max() <= size
    place = 0
    for lane in range(lanes):
        own = rows[rows["lane"] == lane]
        for row in own:
            assert row["start"] == place and row["before"] == row["start"] - own["start"][0]
            place += row["length"]
        assert (own["length"][:-1] == size).all()
    assert place == places
    steps = rows["before"] // size
    assert (np.diff(steps) >= 0).all() and (np.diff(rows["lane"])[np.diff(steps) == 0] > 0).all()


class Laned:
    """Positions of a text of `places` tokens; each token is its position."""

    def __init__(self, places: int, size: int, lanes: int = 1):
        self.places, self.size, self.lanes, self.rows = places, size, lanes, segments(places, lanes, size)

    def plan(self, epoch: int) -> Plan:
        return Plan(self.rows, self.rows["length"].astype(np.int64))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        tokens = np.concatenate([np.arange(row["start"], row["start"] + row["length"]) for row in rows])
        numbers = torch.from_numpy(np.asarray(examples))
        return Batch(
            Packed(torch.from_numpy(tokens), tuple(rows["length"].tolist())), {}, numbers, numbers.int(),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )  # fmt: skip

    def metadata(self) -> dict[str, int]:
        return {"lanes": self.lanes}


class Undivided(Laned):
    """The same text, divided into lanes by a loader."""

    def in_lanes(self, lanes: int) -> Laned:
        return Laned(self.places, self.size, lanes)


def test_each_step_has_one_segment_per_lane() -> None:
    loader = PackedLoader(Undivided(101, 8), seed=5, batch_examples=3, micro_batch_tokens=16)
    assert loader.steps_in_epoch(0) == 5 and loader.metadata()["lanes"] == 3
    steps = [step for step, _ in zip(loader.steps(), range(10), strict=False)]
    for number, step in enumerate(steps):
        lanes = [batch.lanes for batch in step.batches]
        assert [number for part in lanes for number in part.numbers] == [0, 1, 2]
        assert [batch.tokens for batch in step.batches] == ([16, 8] if number % 5 < 4 else [5])
        assert {read for part in lanes for read in part.read} == {number % 5 * 8}
    later = next(iter(loader.steps(steps[6].cursor)))
    assert [batch.inputs.tokens.tolist() for batch in later.batches] == [
        batch.inputs.tokens.tolist() for batch in steps[7].batches
    ]
    with pytest.raises(UserError, match="trains in one process"):
        loader.steps(None, 0, 2)


def test_batch_tokens_and_evaluation_use_lanes() -> None:
    assert PackedLoader(Undivided(101, 8), 0, batch_tokens=33).metadata()["lanes"] == 4
    held_out = PackedLoader(Laned(101, 8, 7), 0, batch_tokens=24, shuffle=False)
    batches = list(held_out.epoch_batches())
    assert sum(batch.tokens for batch in batches) == 101 and max(batch.tokens for batch in batches) == 24
    assert [batch.lanes.read[0] for batch in batches] == [0, 0, 0, 8, 8, 8]
    assert all(len(set(batch.lanes.read)) == 1 and batch.lanes.count == 7 for batch in batches)
