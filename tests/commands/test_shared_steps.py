"""Several processes have the losses and weights of one, for every kind of learner, with dropout, micro-batches, and
steps that skip a part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import TINY, merge_overrides, working_in
from tests.commands.shared_steps import capture_work, train_steps
from tests.training.ranks import Ranks, alone, started

DROPOUT = ["model.dropout=0.1", "model.attention_dropout=0.1"]
TEXT = [*TINY, "data=text", "data.path=text.txt", "cache_dir=cache", "batch_tokens=256", "max_steps=20"]
PRETRAIN = ["pretrain", "model=bert_tiny", *TEXT, *DROPOUT]
FINETUNE = [
    "finetune", "model=bert_tiny", *TINY, *DROPOUT, "checkpoint=none", "task=sst2", "task.path=rows", "cache_dir=cache",
    "batch_examples=16", "max_epochs=null", "max_steps=20",
]  # fmt: skip
UNFREEZING = ["tuning/schedule=gradual_unfreezing", "tuning.schedule.every_steps=2"]
WITH_TEACHER = ["distill.teacher=runs/taught"]
TASK = "{name: task, task: {kind: classification, name: sst2, path: rows, text: [sentence]}}"
CASES = {
    "mlm": PRETRAIN,
    "blocks": [*PRETRAIN, "model=bigbird_tiny", "model.block_size=2", "model.random_blocks=1"],
    "clm": [*PRETRAIN, "model=gpt_tiny"],
    "span corruption": [*PRETRAIN, "model=t5_tiny", "model.attention_dropout=0"],
    "denoising": [*PRETRAIN, "model=bart_tiny"],
    # Two networks; in some steps one rank has one more micro-batch than the other.
    "rtd": [*PRETRAIN, "model=electra_tiny", "micro_batch_tokens=100"],
    "rtd in two stages": [
        *PRETRAIN, "model=electra_tiny", "objective.training=two_stage", "objective.generator_steps=3",
        "objective.generator_size=1",
    ],
    "phases": [*PRETRAIN, "phases=[{share: 0.5, max_length: 16},{share: 0.5, max_length: 32}]"],
    # With three examples per step, some ranks and steps have no example of a member.
    "mixture": [
        *PRETRAIN, "objective=mixture", f"objective.members=[mlm,{TASK}]", "batch_tokens=null", "batch_examples=3",
    ],
    "task": FINETUNE,
    "recomputed": [*PRETRAIN, "gradient_checkpointing=true", "micro_batch_tokens=100"],
    "compiled": [*PRETRAIN, "compile=true", "micro_batch_tokens=100"],
    "micro-batches": [*FINETUNE, "micro_batch_tokens=64"],
    "two examples": [*FINETUNE, "batch_examples=2", "micro_batch_tokens=32"],
    "lora": [*FINETUNE, "tuning=lora", "tuning.dropout=0.1", *UNFREEZING],
    "prefix": [*FINETUNE, "tuning=prefix"],
    "unfreezing": [*FINETUNE, "checkpoint=runs/start", "tuning/regularization=l2_sp", *UNFREEZING],
    "mixout": [*FINETUNE, "checkpoint=runs/start", "tuning/regularization=mixout"],
    "soft": [*FINETUNE, "distill=soft", *WITH_TEACHER],
    "hidden": [*FINETUNE, "distill=hidden", *WITH_TEACHER],
    "codistillation": [*FINETUNE, "distill=codistillation", "distill.burn_in_steps=3", "distill.refresh_steps=2"],
}  # fmt: skip
QUICK = {"rtd"}
# The cases that parallel=fsdp trains; the others are refused (test_sharding_rules.py).
SHARDED = {
    name: [word for word in words if word not in UNFREEZING] + ["parallel=fsdp"]
    for name, words in CASES.items()
    if name not in ("mixture", "unfreezing", "mixout", "codistillation")
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shared")
    with working_in(folder):
        yield folder


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with started(3) as ranks:
        yield ranks


def run_before(name: str, words: list[str]) -> None:
    if not Path("runs", name).exists():
        assert cli.main(merge_overrides(words, [f"name={name}", "max_steps=2"])) == 0


def assert_same(one: dict[str, Any], several: list[dict[str, Any]], weights: float = 1e-5) -> None:
    """Checks that examples are equal, the first loss and gradients within 1e-6, all losses within 1e-5, and that all
    ranks agree."""
    first = several[0]
    for number, order in enumerate(one["read"]):
        fractions = [rank["read"][number] for rank in several]
        assert sorted(example for share in fractions for example in share) == sorted(order)
        assert all(share == [example for example in order if example in share] for share in fractions)
        assert len({rank["forwards"][number] for rank in several}) == 1
        terms = {name: term for name, term in first["terms"][number].items() if not math.isnan(term)}
        assert terms == pytest.approx(one["terms"][number], rel=1e-5, abs=1e-6)
    assert first["tokens"] == one["tokens"]
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert first["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    longest = math.sqrt(sum(float((g**2).sum()) for g in one["gradients"].values() if g is not None))
    for name, gradient in one["gradients"].items():
        assert (first["gradients"][name] is None) == (gradient is None)
        if gradient is not None:
            np.testing.assert_allclose(first["gradients"][name], gradient, rtol=0, atol=1e-6 * longest)
    for rank in several[1:]:
        assert rank["losses"] == first["losses"]
        assert all(np.array_equal(rank["weights"][name], weight) for name, weight in first["weights"].items())


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_two_processes_match_one(two: Ranks, case: str) -> None:
    words = CASES[case]
    if "checkpoint=runs/start" in words:
        run_before("start", PRETRAIN)
    if WITH_TEACHER[0] in words:
        run_before("taught", [*FINETUNE, "model.num_layers=2"])
    work, steps = capture_work(words), 6 if case in QUICK else 20
    assert_same(alone(train_steps, work, steps), two.run(train_steps, work, steps))


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED)
def test_two_sharded_processes_match_one(two: Ranks, case: str) -> None:
    if WITH_TEACHER[0] in SHARDED[case]:
        run_before("taught", [*FINETUNE, "model.num_layers=2"])
    work = capture_work(SHARDED[case])
    assert_same(alone(train_steps, work, 8), two.run(train_steps, work, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "parallel"),
    [("two examples", "ddp"), ("mixture", "ddp"), ("rtd", "ddp"), ("two examples", "fsdp"), ("rtd", "fsdp")],
)
def test_three_processes_match_one(three: Ranks, case: str, parallel: str) -> None:
    """Also for steps with fewer examples than processes."""
    work = capture_work([*CASES[case], f"parallel={parallel}"])
    one, several = alone(train_steps, work, 20), three.run(train_steps, work, 20)
    assert_same(one, several)
    if case == "two examples":
        assert all([] in [rank["read"][number] for rank in several] for number in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlm", "task"])
def test_double_precision_gradients_match_to_rounding(two: Ranks, case: str) -> None:
    work = capture_work([*CASES[case]])
    one, several = alone(train_steps, work, 1, True), two.run(train_steps, work, 1, True)
    largest = max(float(np.abs(gradient).max()) for gradient in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        assert gradient.dtype == np.float64
        np.testing.assert_allclose(several[0]["gradients"][name], gradient, rtol=0, atol=1e-12 * largest)
