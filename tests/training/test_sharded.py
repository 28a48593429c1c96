"""Sharded training (fsdp) in two processes matches one process, and its checkpoints load in any number of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.fsdp import FSDPModule

from lmtool.config.registry import build
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.evaluation import evaluate
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.objectives.configs import ClmConfig, MlmConfig, RtdConfig, SpanCorruptionConfig
from lmtool.runs import checkpoints
from lmtool.runs.checkpoints import read_tensors
from lmtool.runs.run_folder import FollowedFolder, RunFolder
from lmtool.system import files
from lmtool.training.configs import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    ConstantConfig,
    LambConfig,
    MuonConfig,
    StableAdamWConfig,
)
from lmtool.training.engine import engine_for, shard
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.loop import train
from lmtool.training.precision import Precision
from lmtool.training.progress import TrainingSettings
from lmtool.training.sharding import gather_tensors
from lmtool.training.step import gradients
from lmtool.types import Step, Target
from tests.breadth import slow_but
from tests.objectives.objective_fixtures import SIZES, backbone, rows_of, split, store, tokenizer

from .fakes import FakeLearner, FakeLoader
from .ranks import Ranks, started

CPU = torch.device("cpu")
CONFIG = {"model": {"name": "tiny"}}
LEARNERS: dict[str, Any] = {
    "mlm": ("bert", MlmConfig()),
    "nsp": ("bert", MlmConfig(pairs="nsp")),
    "albert": ("albert", MlmConfig(pairs="sop")),
    "rtd": ("bert", RtdConfig()),
    "clm": ("gpt", ClmConfig()),
    "span_corruption": ("t5", SpanCorruptionConfig()),
}
KINDS = {"bert": "wordpiece", "albert": "wordpiece", "gpt": "bytebpe", "t5": "t5"}
OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamWConfig(lr=1e-3, epsilon=1e-6),
    "scaled": AdamWConfig(lr=1e-3, scale_parameter=True, epsilon=1e-6),
    "adam": AdamConfig(lr=1e-3, epsilon=1e-6),
    "adafactor": AdafactorConfig(lr=1e-3, beta1=0.9),
    "stable_adamw": StableAdamWConfig(lr=1e-3),
    "lamb": LambConfig(lr=1e-3),
    "muon": MuonConfig(lr=1e-3),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


def learner_of(name: str) -> Any:
    family, objective = LEARNERS[name]
    tokens = tokenizer(KINDS[family])
    model = build(AlbertConfig(**SIZES, embedding_size=16), 0) if family == "albert" else backbone(family)
    return build(objective, model, tokens, 3), tokens


class Stopped(Exception):
    """Simulates a killed run."""


def run_on(
    group: ProcessGroup, folder: str, name: str, parallel: Any, optimizer: str = "adamw", stop: int = 0, **changes: Any
) -> Any:
    """Start or resume a run.

    Args:
        stop: Step in which the run is killed; 0 for none.

    Returns:
        Losses and gradient norms of its steps, and its validation losses.
    """
    learner, tokens = learner_of(name)
    data = split(store(tokens))
    examples = learner.examples(data, 32)
    held_out = PackedLoader(examples, 0, None, 512, shuffle=False)
    own: dict[str, Any] = {
        "seed": 3, "metric": "loss", "greater_is_better": False, "device": "cpu", "precision": "fp32", "log_every": 1,
        "evaluate_every": 10, "parallel": parallel, "max_steps": 20,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []

    def score(step: int) -> dict[str, Any]:
        return evaluate(learner, learner.scorer(data, examples, {}), held_out.epoch_batches()).metrics()

    def append(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["step"] == stop:
            raise Stopped

    opened = (
        FollowedFolder(Path(folder), CONFIG, None)
        if group.rank
        else RunFolder(Path(folder), CONFIG, yaml.safe_dump(CONFIG))
    )
    with opened as run, suppress(Stopped):
        write, run.append = run.append, lambda row: (write(row), append(row))  # type: ignore[method-assign]
        train(
            learner, PackedLoader(examples, 0, 7, micro_batch_tokens=64), score, run,
            TrainingSettings(**own | changes, optimizer=OPTIMIZERS[optimizer], schedule=ConstantConfig()), group=group,
        )  # fmt: skip
    steps = [row for row in rows if row["split"] == "train"]
    scores = [row["loss"] for row in rows if row["split"] == "validation"]
    return np.array([[row["loss"], row["grad_norm"]] for row in steps]), np.array(scores)


def assert_same_files(here: Path, there: Path, step: int) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        own, others = (read_tensors(path / f"checkpoints/step_{step:08d}", file) for path in (here, there))
        assert own.keys() == others.keys() and len(own) > 20
        for key, tensor in own.items():
            torch.testing.assert_close(others[key], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text)


def step_on(group: ProcessGroup, name: str) -> Any:
    """Gradients, loss and local sizes of one step in which the second rank has no MLM targets."""
    if name == "fake":
        learner: Any = FakeLearner(dropout=0.0)
        batches = next(iter(FakeLoader(batch_examples=8, micro_batches=2).steps(None))).batches
    else:
        learner, tokens = learner_of(name)
        examples = learner.examples(split(store(tokens)), 32)
        batch, none = rows_of(examples, 4), torch.zeros(0, dtype=torch.int64)
        batches = [batch, replace(batch, targets={"mlm": Target(none, at=none)})]
    if group.size > 1:
        shard(learner, CPU, group)
    engine = engine_for(learner, "fsdp", group)
    outcome = gradients(engine, Step(batches[group.rank :: group.size], {}, 0.0), 1, 0, Precision("fp32", CPU, ""))
    own = {name: parameter.grad for name, parameter in learner.named_parameters() if parameter.grad is not None}
    fractions = {name: tensor.to_local().numel() for name, tensor in own.items() if hasattr(tensor, "to_local")}
    return {name: tensor.numpy() for name, tensor in gather_tensors(own, True).items()}, float(outcome.loss), fractions


@pytest.mark.parametrize("name", ["mlm", "fake"])
def test_sharded_step_matches_single_process(name: str, two: Ranks) -> None:
    """With a rank without predictions, an unused parameter, and a penalty."""
    wanted, loss, _ = step_on(ALONE, name)
    answers = two.run(step_on, name)
    for own, other, fractions in answers:
        assert other == pytest.approx(loss, rel=1e-6) and own.keys() == wanted.keys() == fractions.keys()
        for key, gradient in wanted.items():
            np.testing.assert_allclose(own[key], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max(), err_msg=key)
    for key, gradient in wanted.items():
        assert answers[0][2][key] + answers[1][2][key] == gradient.size and answers[1][2][key] < gradient.size


def killed_in_save(group: ProcessGroup, folder: str) -> None:
    """A run that saves after each step, in which rank 0 dies in its third save."""
    saves = []

    def write_manifest(draft: Path, metadata: dict[str, Any]) -> None:
        saves.append(metadata)
        if len(saves) == 3:
            os._exit(1)
        files.write_manifest(draft, metadata)

    checkpoints.write_manifest = write_manifest
    run_on(group, folder, "mlm", "fsdp", max_steps=6, checkpoint_every=1)


@pytest.mark.slow
def test_kill_during_save_keeps_previous_checkpoint(two: Ranks, tmp_path: Path) -> None:
    alone, _ = run_on(ALONE, str(tmp_path / "alone"), "mlm", "ddp", max_steps=6)
    with started(2) as doomed, pytest.raises((EOFError, AssertionError)):
        doomed.run(killed_in_save, str(tmp_path / "two"))
    left = {path.name for path in (tmp_path / "two/checkpoints").iterdir() if path.is_dir()}
    assert "step_00000002" in left and "step_00000003" not in left and any(name.startswith(".tmp") for name in left)
    then, _ = two.run(run_on, str(tmp_path / "two"), "mlm", "fsdp")[0]
    np.testing.assert_allclose(then[:4], alone[2:], rtol=1e-5)


@pytest.mark.parametrize("name", slow_but([], LEARNERS))
def test_sharded_run_matches_single_process(name: str, two: Ranks, tmp_path: Path) -> None:
    alone, scores = run_on(ALONE, str(tmp_path / "alone"), name, "ddp")
    for steps, own in two.run(run_on, str(tmp_path / "two"), name, "fsdp"):
        np.testing.assert_allclose(steps[0], alone[0], rtol=1e-6)
        np.testing.assert_allclose(steps, alone, rtol=1e-5)
        np.testing.assert_allclose(own, scores, rtol=1e-5)
    assert_same_files(tmp_path / "alone", tmp_path / "two", 20)


def test_resume_with_other_ranks_and_engine_matches(two: Ranks, tmp_path: Path) -> None:
    alone, _ = run_on(ALONE, str(tmp_path / "alone"), "mlm", "ddp", max_steps=10)
    folder, often = str(tmp_path / "parts"), {"max_steps": 10, "checkpoint_every": 1}
    parts = [
        two.run(partial(run_on, stop=4, **often), folder, "mlm", "fsdp")[0][0],
        run_on(ALONE, folder, "mlm", "fsdp", stop=6, **often)[0],
        two.run(partial(run_on, stop=8, **often), folder, "mlm", "ddp")[1][0],
        two.run(partial(run_on, **often), folder, "mlm", "fsdp")[1][0],
    ]
    trained = np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])
    np.testing.assert_allclose(trained, alone, rtol=1e-5)
    assert_same_files(tmp_path / "alone", tmp_path / "parts", 10)


@pytest.mark.parametrize("name", slow_but([], OPTIMIZERS))
def test_sharded_optimizers_match_single_process(name: str, two: Ranks, tmp_path: Path) -> None:
    alone, _ = run_on(ALONE, str(tmp_path / "alone"), "mlm", "ddp", name, max_steps=6, evaluate_every=6)
    folder, often = str(tmp_path / "two"), {"max_steps": 6, "checkpoint_every": 3, "evaluate_every": 6}
    first = two.run(partial(run_on, stop=4, **often), folder, "mlm", "fsdp", name)[0][0]
    then = two.run(partial(run_on, **often), folder, "mlm", "fsdp", name)[0][0]
    # Muon multiplies in bf16, which rounds more.
    np.testing.assert_allclose(np.concatenate([first[:3], then]), alone, rtol=1e-3 if name == "muon" else 1e-5)


def test_scalar_parameter_is_refused() -> None:
    learner = torch.nn.Linear(2, 2)
    learner.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="scale is a scalar"):
        shard(learner, CPU, ALONE)


def test_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(UserError, match="needs torch 2.13 or newer"):
        shard(torch.nn.Linear(2, 2), CPU, ALONE)
