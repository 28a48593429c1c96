"""Kill -9 the real commands at any moment: started again they end with the same rows and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.jobs import FAMILIES
from tests.training.test_kill import run_harness


def test_killed_commands_go_on_bitwise_and_so_do_two_stages(tmp_path: Path) -> None:
    """One process for all, whose start would cost more than they do.

    Two stages are killed around the switch: the model starts from the generator's weights in step 4, once, whether a
    run resumes from the first stage's last checkpoint or from the second stage's first.
    """
    jobs, kills = ["multitask", "two_stages@4@5"], [2, 2]
    counted = run_harness(f"tests.commands.jobs:{','.join(jobs)}", tmp_path, 2)
    for job, least, counts in zip(jobs, kills, counted, strict=True):
        assert counts["kills"] >= least and counts["resumed"], (job, counts)
        assert (counts["unreadable"], counts["files"]) == (0, []), (job, counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kills"),
    [
        *((FAMILIES[first : first + 5], 3) for first in range(0, len(FAMILIES), 5)),
        (["finetuning", "tuning", "peers"], 5),
        (["branching"], 10),
    ],
    ids=str,
)
def test_killed_commands_go_on_bitwise(tmp_path: Path, names: list[str], kills: int) -> None:
    """Every family, with the state that it carries from batch to batch."""
    counted = run_harness(f"tests.commands.jobs:{','.join(names)}", tmp_path, kills)
    for name, counts in zip(names, counted, strict=True):
        assert counts["kills"] >= kills and counts["resumed"], (name, counts)
        assert (counts["unreadable"], counts["files"]) == (0, []), (name, counts)


@pytest.mark.slow
def test_a_hundred_kills_of_pretraining(tmp_path: Path) -> None:
    (counts,) = run_harness("tests.commands.jobs:pretraining", tmp_path, 100)
    assert counts["kills"] == 100
    assert (counts["unreadable"], counts["differing"]) == (0, 0), counts
