"""One rank of 64 with torch's fake process group: the tensors of each rank, and the messages of a step, a checkpoint
and a resumed run, as docs/scale.md counts them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtool.config.registry import build
from lmtool.data.loader import PackedLoader
from lmtool.objectives.configs import MlmConfig
from lmtool.runs.checkpoints import save_tensors
from lmtool.runs.finding import MODEL, OPTIMIZER
from lmtool.training import engine
from lmtool.training.configs import AdamWConfig
from lmtool.training.engine import engine_for, shard
from lmtool.training.optimizers import state_tensors
from lmtool.training.precision import FP32_CPU
from lmtool.training.sharding import gather_tensors, is_sharded, load_weights
from lmtool.training.step import gradients
from lmtool.types import Step
from tests.objectives.objective_fixtures import backbone, rows_of, split, store, tokenizer

from .fake_ranks import SIZE, FakeGroup, Traffic, completed_all_reduce, forget_rank

# CommDebugMode hooks every module, but lmtool's modules return dataclasses.
WARNINGS = ("For backward hooks", "Full backward hook", "FSDP2-wrapped")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in WARNINGS]
LAYERS = 3
CPU = torch.device("cpu")


@pytest.fixture(params=[0, 1, SIZE - 1])
def group(request: pytest.FixtureRequest) -> Iterator[FakeGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    yield FakeGroup(request.param)
    dist.destroy_process_group()
    forget_rank()


def learner_and_batch() -> tuple[Any, Any]:
    """A learner whose tables and layers have row counts divisible by 64."""
    words = tokenizer()
    sizes = {"vocab_size": 448, "hidden_size": 64, "feedforward_size": 128, "num_layers": LAYERS}
    learner = build(MlmConfig(), backbone("bert", **sizes), words, 3)
    return learner, rows_of(learner.examples(split(store(words)), 32), 4)


def step_of(learner: Any, batch: Any, parallel: Any, group: Any) -> Traffic:
    runs = engine_for(learner, parallel, group)
    with Traffic() as traffic:
        outcome = gradients(runs, Step([batch], {}, 0.0), 1, 0, FP32_CPU)
    assert bool(torch.isfinite(outcome.loss)) and outcome.tokens == SIZE * batch.tokens
    return traffic


def test_ddp_sends_gradients_once(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_summed", completed_all_reduce)
    learner, batch = learner_and_batch()
    learning = sum(parameter.numel() for parameter in learner.parameters())
    traffic = step_of(learner, batch, "ddp", group)
    assert set(traffic.calls) == {"allreduce_"} and group.messages == 1  # the loop sends one more, for the clock
    # Besides gradients: the loss, its terms, and flags of used parameters.
    parameters = len(list(learner.parameters()))
    assert 4 * learning <= traffic.bytes["allreduce_"] <= 4 * (learning + parameters + 16)
    with Traffic() as traffic:
        saved = gather_tensors(learner.state_dict(keep_vars=True), writes=group.rank == 0)
    assert not traffic.calls and len(saved) == (len(learner.state_dict()) if group.rank == 0 else 0)


def test_fsdp_gathers_weights_twice_and_scatters_once(group: FakeGroup) -> None:
    learner, batch = learner_and_batch()
    shapes = {name: tuple(parameter.shape) for name, parameter in learner.named_parameters()}
    shard(learner, CPU, group)  # type: ignore[arg-type]
    held = {name: tuple(parameter.to_local().shape) for name, parameter in learner.named_parameters()}
    assert held.keys() == shapes.keys()
    padded = 0
    for name, (rows, *rest) in shapes.items():
        each = -(-rows // SIZE)  # torch.chunk's
        assert held[name] == (max(0, min(each, rows - each * group.rank)), *rest), name
        padded += SIZE * each * int(torch.Size(rest).numel())
    traffic = step_of(learner, batch, "fsdp", group)
    units = LAYERS + 1
    # Parameters outside the layers stay gathered until their backward.
    assert traffic.calls["_allgather_base_"] == 2 * LAYERS + 1 and traffic.calls["_reduce_scatter_base_"] == units
    assert traffic.bytes["_reduce_scatter_base_"] == 4 * padded
    assert 4 * padded < traffic.bytes["_allgather_base_"] <= 2 * 4 * padded
    assert group.messages == 2  # counts of predictions, and used parameters


def test_ranks_split_every_step_without_messages(group: FakeGroup) -> None:
    examples = learner_and_batch()[0].examples(split(store(tokenizer())), 32)
    loader, sizes = PackedLoader(examples, 3, batch_examples=130, micro_batch_tokens=64), list[int]()
    with Traffic() as traffic:
        (step,) = islice(loader.steps(None, group.rank, SIZE), 1)
        read = [number for batch in step.batches for number in batch.examples.tolist()]
        for rank in range(SIZE):
            (other,) = islice(loader.steps(None, rank, SIZE), 1)
            numbers = [number for batch in other.batches for number in batch.examples.tolist()]
            assert rank == group.rank or not set(numbers) & set(read)
            assert len(other.batches) + len(other.idle) == len(step.batches) + len(step.idle)
            sizes.append(len(numbers))
    assert sum(sizes) == min(130, len(examples.plan(0))) and max(sizes) - min(sizes) <= 1
    assert not traffic.calls and not group.messages


def test_only_rank_0_gathers_full_checkpoint(group: FakeGroup, tmp_path: Path) -> None:
    learner, batch = learner_and_batch()
    shapes = {name: tuple(tensor.shape) for name, tensor in learner.state_dict().items()}
    moments = {f"{kind}.{name}" for name, _ in learner.named_parameters() for kind in ("exp_avg", "exp_avg_sq")}
    values = sum(parameter.numel() for parameter in learner.parameters())
    shard(learner, CPU, group)  # type: ignore[arg-type]
    step_of(learner, batch, "fsdp", group)
    optimizer = build(AdamWConfig(), learner.parameter_groups())
    optimizer.step()
    named, keeps = dict(learner.named_parameters()), group.rank == 0
    weights, state = learner.state_dict(keep_vars=True), state_tensors(optimizer, named)
    held = sum(tensor.to_local().nbytes for tensor in (*named.values(), *state.values()) if is_sharded(tensor))
    assert 12 * values / SIZE / 2 < held < 2 * 12 * values / SIZE
    with Traffic() as traffic:
        saved = {MODEL: gather_tensors(weights, keeps), OPTIMIZER: gather_tensors(state, keeps)}
    cut = {id(tensor): tensor for tensor in (*weights.values(), *state.values()) if is_sharded(tensor)}
    assert set(traffic.calls) == {"all_gather_into_tensor"}
    assert traffic.calls["all_gather_into_tensor"] == len(cut) == 3 * len(named)
    padded = sum(SIZE * -(-len(tensor) // SIZE) * tensor[:1].numel() * tensor.element_size() for tensor in cut.values())
    assert traffic.bytes["all_gather_into_tensor"] == padded
    if not keeps:
        assert not saved[MODEL] and not saved[OPTIMIZER]
        return
    assert {name: tuple(tensor.shape) for name, tensor in saved[MODEL].items()} == shapes
    assert moments <= saved[OPTIMIZER].keys()
    assert sum(tensor.nbytes for tensor in saved[OPTIMIZER].values()) == pytest.approx(8 * values, rel=1e-2)
    for name, tensors in saved.items():
        save_tensors(tensors, tmp_path / name)
    size = sum((tmp_path / name).stat().st_size for name in saved)
    assert size == pytest.approx(12 * values, rel=0.05)


def test_ranks_load_checkpoint_without_messages(group: FakeGroup) -> None:
    learner, _ = learner_and_batch()
    complete = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    shard(learner, CPU, group)  # type: ignore[arg-type]
    with Traffic() as traffic:
        load_weights(learner, complete, "a checkpoint")
    assert not traffic.calls
    for name, parameter in learner.named_parameters():
        rows, each = complete[name], -(-len(complete[name]) // SIZE)
        assert torch.equal(parameter.to_local(), rows[each * group.rank : each * (group.rank + 1)]), name
