"""Kill -9 the real commands at any moment: started again they end with the same rows and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_kill import run_harness


def test_killed_commands_go_on_bitwise_and_so_do_two_stages(tmp_path: Path) -> None:
    """One process for all, whose start would cost more than they do.

    Two stages are killed around the switch: the model starts from the generator's weights in step 4, once, whether a
    run resumes from the first stage's last checkpoint or from the second stage's first.
    """
    jobs, kills = ["pretraining", "multitask", "finetuning", "tuning", "two_stages@4@5"], [3, 3, 3, 3, 2]
    counted = run_harness(f"tests.commands.jobs:{','.join(jobs)}", tmp_path, 3)
    assert [counts["kills"] for counts in counted] == kills
    for job, counts in zip(jobs, counted, strict=True):
        assert (counts["unreadable"], counts["differing"]) == (0, 0), (job, counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "kills"),
    [
        ("gpt,t5,electra,bart", 5),
        ("word_vectors,cnn,lstm,transformer_xl,rnn_attention", 3),
        ("peers", 5),
        ("branching", 10),
    ],
)
def test_killed_commands_go_on_bitwise(tmp_path: Path, jobs: str, kills: int) -> None:
    counted = run_harness(f"tests.commands.jobs:{jobs}", tmp_path, kills)
    assert len(counted) == len(jobs.split(","))
    for job, counts in zip(jobs.split(","), counted, strict=True):
        assert counts["kills"] == kills
        assert (counts["unreadable"], counts["differing"]) == (0, 0), (job, counts)


@pytest.mark.slow
def test_a_hundred_kills_of_pretraining(tmp_path: Path) -> None:
    (counts,) = run_harness("tests.commands.jobs:pretraining", tmp_path, 100)
    assert counts["kills"] == 100
    assert (counts["unreadable"], counts["differing"]) == (0, 0), counts
