"""Kill -9 the real commands at any moment: started again they end with the same rows and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_kill import run_harness


@pytest.mark.parametrize(
    ("jobs", "kills"),
    [
        ("pretraining,multitask,finetuning,tuning", 3),  # one process, whose start would cost more than they do
        pytest.param("gpt,t5,electra,bart", 5, marks=pytest.mark.slow),
        pytest.param("word_vectors,cnn,lstm,transformer_xl", 3, marks=pytest.mark.slow),
        pytest.param("peers", 5, marks=pytest.mark.slow),
        pytest.param("branching", 10, marks=pytest.mark.slow),
    ],
)
def test_killed_commands_go_on_bitwise(tmp_path: Path, jobs: str, kills: int) -> None:
    counted = run_harness(f"tests.commands.jobs:{jobs}", tmp_path, kills)
    assert len(counted) == len(jobs.split(","))
    for job, counts in zip(jobs.split(","), counted, strict=True):
        assert counts["kills"] == kills
        assert (counts["unreadable"], counts["differing"]) == (0, 0), (job, counts)


def test_two_stages_go_on_bitwise_around_the_switch(tmp_path: Path) -> None:
    """The model starts from the generator's weights in step 4, once: whether a run resumes from the first stage's last
    checkpoint or from the second stage's first."""
    (counts,) = run_harness("tests.commands.jobs:two_stages", tmp_path, 0, "--steps", "4", "5")
    assert (counts["kills"], counts["differing"]) == (2, 0), counts


@pytest.mark.slow
def test_a_hundred_kills_of_pretraining(tmp_path: Path) -> None:
    (counts,) = run_harness("tests.commands.jobs:pretraining", tmp_path, 100)
    assert counts["kills"] == 100
    assert (counts["unreadable"], counts["differing"]) == (0, 0), counts
