"""State carried along lanes: segments equal one long pass, also with evaluations, micro-batches and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from objective_fixtures import SIZES, gradients, sentences, split, store, tokenizer
from torch import nn

from lmtool.data.loader import PackedLoader
from lmtool.learners.evaluation import TermScorer, evaluate
from lmtool.models.base import Decoder
from lmtool.models.configs import GptConfig
from lmtool.nn.cache import Carried, CarriedState, carried_tensors
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import normal
from lmtool.nn.positions import Position
from lmtool.objectives.clm import CausalLanguageModel
from lmtool.objectives.configs import ClmConfig
from lmtool.training.loop import train
from lmtool.types import Lanes
from tests.training.fakes import open_run, settings


class RunningConfig(GptConfig):
    carries_state: ClassVar[bool] = True


class Running(Decoder):
    """A recurrent decoder; the carried state is the last hidden state of each document."""

    def __init__(self, config: RunningConfig):
        super().__init__(config, Embeddings(config.vocab_size, config.hidden_size, Position(), config.dropout), [])
        self.cell = nn.GRU(config.hidden_size, config.hidden_size)

    def initial_draw(self):
        return normal(0.3)

    def initial_state(self, lanes):
        return {"hidden": torch.zeros(lanes, self.hidden_size)}

    def forward(self, packed, rng=None, cache=None, read_M=None, tap=None, carried=None):
        x_TH = self.embed.finish(self.embed.tokens(packed.tokens), packed, packed.positions, rng)
        before = self.initial_state(len(packed.lengths)) if carried is None else carried.before
        outs = [
            self.cell(part, first[None])
            for part, first in zip(x_TH.split(packed.lengths), before["hidden"], strict=True)
        ]
        if carried is not None:
            carried.after = {"hidden": torch.cat([last for _, last in outs])}
        hidden_TH = torch.cat([states for states, _ in outs])
        return hidden_TH if read_M is None else hidden_TH[read_M]


TOKENS = tokenizer("bytebpe")
STORE = store(TOKENS, sentences(12))


def learner() -> CausalLanguageModel:
    config = RunningConfig(**{**SIZES, "dropout": 0.0})
    backbone = Running(config)
    backbone.initialize(backbone, 0, "backbone.")
    return CausalLanguageModel(ClmConfig(), backbone, TOKENS, 3)


def loader(built: CausalLanguageModel, **sizes: int) -> PackedLoader:
    return PackedLoader(built.examples(split(STORE), 16), 3, **{"batch_examples": 4, **sizes})


def test_segments_and_micro_batches_match_one_long_pass() -> None:
    built = learner()
    steps = loader(built).steps_in_epoch(0)
    assert steps > 3
    sums = []
    for sizes in ({}, {"micro_batch_tokens": 32}):
        parts = [batch for step, _ in zip(loader(built, **sizes).steps(), range(steps), strict=False)
                 for batch in step.batches]  # fmt: skip
        with torch.no_grad():
            sums.append(sum(float(built(batch, 1).sums["clm"]) for batch in parts))
    whole = built.examples(split(STORE), len(built.examples(split(STORE), 16).stream)).in_lanes(4)
    rows = whole.plan(0).rows
    assert len(rows) == 4
    with torch.no_grad():
        expected = float(built(whole.batch(rows, rows["lane"], 0), 1).sums["clm"])
    assert sums == pytest.approx([expected] * 2, rel=1e-5)
    assert sum(rows["length"]) == len(whole.stream) - 1  # every token but the first


def test_separate_documents_carry_no_state() -> None:
    built = learner()
    windows = PackedLoader(built.examples(split(STORE, "separate"), 16), 3, batch_examples=4)
    built(next(iter(windows.steps())).batches[0], 1)
    assert windows.metadata().get("lanes") is None and carried_tensors(built) == {}


def test_carried_state_is_detached_and_required_in_a_started_lane() -> None:
    state, lanes = CarriedState(), Lanes((0, 1), (4, 4), 2)
    with pytest.raises(ValueError, match="under way"):
        state.begin(lanes, lambda count: {"x": torch.zeros(count, 3)})
    last = torch.ones(2, 3, requires_grad=True)
    first = state.begin(Lanes((0, 1), (0, 0), 2), lambda count: {"x": torch.zeros(count, 3)})
    first.after = {"x": last * 2}
    state.keep(lanes, first, lambda count: {"x": torch.zeros(count, 3)})
    second = state.begin(lanes, lambda count: {"x": torch.zeros(count, 3)})
    assert second.before["x"].tolist() == [[2.0] * 3] * 2 and not second.before["x"].requires_grad
    built = learner()
    batches = [step.batches[0] for step, _ in zip(loader(built).steps(), range(2), strict=False)]
    built(batches[0], 1)
    _, with_state = gradients(built, [batches[1]])
    fresh = learner()
    fresh.carried.tensors = {"hidden": built.carried.tensors["hidden"] * 0}
    _, without = gradients(fresh, [batches[1]])
    assert any(not torch.equal(with_state[name], without[name]) for name in with_state)


def evaluated(built: CausalLanguageModel) -> float:
    examples = built.examples(split(STORE, name="validation"), 16).in_lanes(3)
    held_out = PackedLoader(examples, 3, batch_tokens=64)
    return evaluate(built, TermScorer(built), held_out.epoch_batches()).loss


def trained(folder: Path, built: CausalLanguageModel, steps: int, every: int, evaluates: bool = True) -> None:
    with open_run(folder, {"model": {"name": "running"}}) as run:
        train(
            built, loader(built), lambda step: {"loss": evaluated(built) if evaluates else 0.0}, run,
            settings(max_steps=steps, evaluate_every=every, checkpoint_every=2),
        )  # fmt: skip


def test_resume_and_evaluation_keep_the_carried_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, often, resumed = learner(), learner(), learner()
    trained(tmp_path / "whole", whole, 12, 12)
    trained(tmp_path / "often", often, 12, 3)
    stop = [0]

    class Stop(Exception):
        pass

    def dies(batch, step, forward=resumed.forward):
        stop[0] = step
        if step == 8:
            raise Stop
        return forward(batch, step)

    monkeypatch.setattr(resumed, "forward", dies)
    with pytest.raises(Stop):
        trained(tmp_path / "resumed", resumed, 12, 12)
    assert stop == [8]
    again = learner()
    trained(tmp_path / "resumed", again, 12, 12)
    for other in (often, again):
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
        assert torch.equal(whole.carried.tensors["hidden"], other.carried.tensors["hidden"])
    assert evaluated(whole) == evaluated(whole) == evaluated(again)


def test_forward_that_sets_no_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="left none"):
        CarriedState().keep(Lanes((0,), (0,), 1), Carried({}, (0,)), lambda count: {})
