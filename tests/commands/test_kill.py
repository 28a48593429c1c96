"""Real commands killed with SIGKILL at any moment resume to the same rows and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.jobs import FAMILIES
from tests.training.test_kill import run_harness


def test_killed_multitask_and_two_stage_runs_resume_bitwise(tmp_path: Path) -> None:
    """One process runs both jobs, since starting it takes longer than they do.

    The two stages are killed around the switch. The model starts from the generator's weights once, in step 4, whether
    the run resumes from the last checkpoint of the first stage or from the first of the second.
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
def test_killed_commands_resume_bitwise(tmp_path: Path, names: list[str], kills: int) -> None:
    """Every family, with its state carried from batch to batch."""
    counted = run_harness(f"tests.commands.jobs:{','.join(names)}", tmp_path, kills)
    for name, counts in zip(names, counted, strict=True):
        assert counts["kills"] >= kills and counts["resumed"], (name, counts)
        assert (counts["unreadable"], counts["files"]) == (0, []), (name, counts)


@pytest.mark.slow
def test_pretraining_survives_a_hundred_kills(tmp_path: Path) -> None:
    (counts,) = run_harness("tests.commands.jobs:pretraining", tmp_path, 100)
    assert counts["kills"] == 100
    assert (counts["unreadable"], counts["differing"]) == (0, 0), counts
