"""The training loop: gradients, resuming, end of budgets, patience and divergence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lmtool.errors import Diverged, NotFinite, UserError
from lmtool.runs import checkpoints
from lmtool.runs.finding import find, read_state
from lmtool.system.files import MANIFEST, Manifest, write_manifest
from lmtool.training.configs import AdamWConfig, ConstantConfig
from lmtool.training.engine import Plain
from lmtool.training.loop import train
from lmtool.training.optimizers import named_parameters
from lmtool.training.precision import Precision
from lmtool.training.progress import TrainingResult
from lmtool.training.step import apply_gradients, gradients
from lmtool.training.update_rules import build_adamw
from lmtool.types import StepOutput

from .fakes import (
    OPTIMIZER,
    FakeLearner,
    FakeLoader,
    TokenizerFile,
    batch_of,
    evaluator,
    open_run,
    settings,
    train_rows,
)

CPU = torch.device("cpu")
FP32 = Precision("fp32", CPU, "")


def run_training(
    path: Path, loader: FakeLoader | None = None, learner: FakeLearner | None = None, **changes: Any
) -> Any:
    """Train a fresh learner in a folder. Returns the result and the learner."""
    learner = learner or FakeLearner()
    with open_run(path) as run:
        result = train(learner, loader or FakeLoader(), evaluator(learner), run, settings(**changes))
    return result, learner


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def step_gradients(micro_batches: int, **changes: Any) -> tuple[dict[str, torch.Tensor], Any]:
    learner = FakeLearner(dropout=0.0, **changes)
    data = next(iter(FakeLoader(batch_examples=8, micro_batches=micro_batches).steps(None)))
    outcome = gradients(Plain(learner), data, 1, 0, FP32)
    return {
        name: parameter.grad for name, parameter in learner.named_parameters() if parameter.grad is not None
    }, outcome


@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_micro_batches_keep_gradients(micro_batches: int) -> None:
    whole, whole_outcome = step_gradients(1)
    cut, cut_outcome = step_gradients(micro_batches)
    assert whole.keys() == cut.keys() and len(whole) == 8
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=0, atol=1e-6)
    assert float(cut_outcome.loss) == pytest.approx(float(whole_outcome.loss), abs=1e-6)


def test_loss_is_weighted_means_plus_penalties() -> None:
    _, outcome = step_gradients(3)
    learner = FakeLearner(dropout=0.0)
    data = next(iter(FakeLoader(batch_examples=8, micro_batches=1).steps(None)))
    output, counts = learner(data.batches[0], 1), learner.counts(data.batches[0])
    assert counts["word"] != counts["kind"]
    expected = output.sums["word"] / counts["word"] + 0.5 * output.sums["kind"] / counts["kind"]
    expected = expected + learner.penalties()["small"]
    assert float(outcome.loss) == pytest.approx(expected.item(), abs=1e-6)


def test_term_without_predictions_is_omitted() -> None:
    learner = FakeLearner(dropout=0.0)
    data = next(iter(FakeLoader(batch_examples=4).steps(None)))
    even = type(data)([batch_of(np.array([0, 2, 4]))], data.cursor, data.epoch)
    outcome = gradients(Plain(learner), even, 1, 0, FP32)
    assert math.isfinite(float(outcome.loss)) and set(outcome.terms) == {"kind", "small"}
    assert all(torch.isfinite(parameter.grad).all() for parameter in learner.parameters() if parameter.grad is not None)


def test_clipping_reports_norm_before_clipping() -> None:
    norms = {}
    for clip in (None, 0.1):
        learner = FakeLearner(dropout=0.0)
        named = named_parameters(learner.parameter_groups())
        optimizer = build_adamw(OPTIMIZER, learner.parameter_groups())
        gradients(Plain(learner), next(iter(FakeLoader().steps(None))), 1, 0, FP32)
        seen: list[float] = []
        optimizer.register_step_pre_hook(
            lambda *_, seen=seen, named=named: seen.append(
                float(
                    torch.stack(
                        [parameter.grad.norm() for parameter in named.values() if parameter.grad is not None]
                    ).norm()
                )
            )
        )
        norms[clip] = float(apply_gradients(optimizer, None, list(named.values()), clip)), seen[0]
    assert norms[None][0] == pytest.approx(norms[0.1][0]) and norms[None][0] > 0.1
    assert norms[None][1] == pytest.approx(norms[None][0], rel=1e-5)
    assert norms[0.1][1] == pytest.approx(0.1, rel=1e-4)


def test_first_step_matches_torch_adamw(tmp_path: Path) -> None:
    _, learner = run_training(tmp_path / "run", max_steps=1)
    plain = FakeLearner()
    decay = [parameter for parameter in plain.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in plain.parameters() if parameter.ndim < 2]
    adamw = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    gradients(Plain(plain), next(iter(FakeLoader().steps(None))), 1, 3, FP32)
    torch.nn.utils.clip_grad_norm_([*decay, *rest], 1.0)
    adamw.step()
    for (name, parameter), other in zip(learner.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=1e-6, msg=name)


def test_metric_rows_have_documented_keys(tmp_path: Path) -> None:
    result, _ = run_training(tmp_path / "run", max_steps=7, log_every=3, evaluate_every=5)
    logged = rows(tmp_path / "run")
    train_steps = [row["step"] for row in logged if row["split"] == "train"]
    assert train_steps == [*range(1, 8)] and [row["step"] for row in logged if row["split"] == "validation"] == [5, 7]
    keys = {"loss", "loss_word", "loss_kind", "loss_small", "learning_rate", "grad_norm", "tokens", "tokens_per_second"}
    assert keys <= logged[0].keys()
    first = logged[0]
    assert first["loss"] == pytest.approx(first["loss_word"] + 0.5 * first["loss_kind"] + first["loss_small"], rel=1e-5)
    assert (result.status, result.ended, result.steps) == ("done", "max_steps", 7)
    assert result.tokens == logged[-1]["tokens"] and (tmp_path / "latest").readlink() == Path("run")
    assert result.best is not None and result.best.name == f"step_{result.best_step:08d}"


def test_training_lowers_validation_loss(tmp_path: Path) -> None:
    result, _ = run_training(tmp_path / "run", max_steps=100, evaluate_every=20)
    losses = [row["loss"] for row in rows(tmp_path / "run") if row["split"] == "validation"]
    assert losses[-1] < 0.8 * losses[0] and result.best_value == min(losses)


@pytest.mark.parametrize("stop", [1, 6, 10, 13])
def test_resume_matches_uninterrupted_run(tmp_path: Path, stop: int) -> None:
    _, whole = run_training(tmp_path / "whole", checkpoint_every=3)

    class Crash(Exception):
        """A simulated crash."""

    class Breaking(FakeLearner):
        def on_step(self, step: int) -> None:
            torch.rand(step)  # a run does not use the global generator
            if step == stop + 1:
                raise Crash

    with pytest.raises(Crash):
        run_training(tmp_path / "run", learner=Breaking(), checkpoint_every=3)
    torch.rand(5)
    loader = FakeLoader()
    _, again = run_training(tmp_path / "run", loader=loader, checkpoint_every=3)
    assert (loader.asked[0] is None) == (stop < 3)
    for (name, tensor), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    assert train_rows(rows(tmp_path / "run")) == train_rows(rows(tmp_path / "whole"))


@pytest.mark.parametrize("budget", [{"max_steps": 110}, {"max_steps": None, "max_tokens": 6000}])
def test_resumed_run_logs_same_rows(tmp_path: Path, budget: dict[str, Any]) -> None:
    every = {**budget, "log_every": 1000, "evaluate_every": 1000, "checkpoint_every": 50}
    result, _ = run_training(tmp_path / "whole", **every)

    class Crash(Exception):
        """A simulated crash."""

    class Breaking(FakeLearner):
        def on_step(self, step: int) -> None:
            if step == 60:
                raise Crash

    with pytest.raises(Crash):
        run_training(tmp_path / "run", learner=Breaking(), **every)
    run_training(tmp_path / "run", **every)
    logged = train_rows(rows(tmp_path / "whole"))
    assert 50 <= len(logged) <= 80 <= result.steps
    assert train_rows(rows(tmp_path / "run")) == logged


def test_dropout_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    _, first = run_training(tmp_path / "one", max_steps=3)
    torch.manual_seed(99)
    torch.rand(1000)
    _, other = run_training(tmp_path / "other", max_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    _, seeded = run_training(tmp_path / "seeded", max_steps=3, seed=4)
    assert not torch.equal(first.dense.weight, seeded.dense.weight)


def test_finished_run_takes_no_step(tmp_path: Path) -> None:
    first, _ = run_training(tmp_path / "run", max_steps=6)
    loader = FakeLoader()
    again, _ = run_training(tmp_path / "run", loader=loader, max_steps=6)
    assert again.steps == 6 and again.metrics == first.metrics and again.best == first.best
    assert len(rows(tmp_path / "run")) == 8


def test_patience_ends_run_and_keeps_best_checkpoint(tmp_path: Path) -> None:
    scores = iter([3.0, 2.0, 2.5, 2.6, 2.7, 1.0])
    learner = FakeLearner()
    with open_run(tmp_path / "run") as run:
        result: TrainingResult = train(
            learner, FakeLoader(), lambda step: {"loss": next(scores)}, run,
            settings(max_steps=100, evaluate_every=2, patience=3),
        )  # fmt: skip
    assert (result.ended, result.steps, result.best_step, result.best_value) == ("patience", 10, 4, 2.0)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"last", "best", "step_00000004", "step_00000008", "step_00000010"}
    again, _ = run_training(tmp_path / "run", max_steps=100, evaluate_every=2, patience=3)
    assert (again.ended, again.steps) == ("patience", 10)


def test_best_score_is_greatest_and_never_nan(tmp_path: Path) -> None:
    scores = iter([0.2, math.nan, 0.9, 0.5])
    with open_run(tmp_path / "run") as run:
        result = train(
            FakeLearner(), FakeLoader(), lambda step: {"accuracy": next(scores)}, run,
            settings(max_steps=8, evaluate_every=2, metric="accuracy", greater_is_better=True),
        )  # fmt: skip
    assert (result.best_step, result.best_value) == (6, 0.9)
    validation = [row for row in rows(tmp_path / "run") if row["split"] == "validation"]
    assert validation[1]["accuracy"] is None and [row["best"] for row in validation] == [True, False, True, False]


class PoisonedLearner(FakeLearner):
    """A loss or gradient that is not finite in step 7, if the batch starts with the marked token."""

    def __init__(self, value: float, gradient_only: bool = False):
        super().__init__()
        self.value, self.gradient_only = value, gradient_only

    def forward(self, batch: Any, step: int) -> StepOutput:
        output = super().forward(batch, step)
        if int(batch.inputs.tokens[0]) == 63 and step == 7:
            if self.gradient_only:
                output.sums["word"] = output.sums["word"] + (self.dense.weight * 0).sqrt().sum()
            else:
                output.sums["word"] = output.sums["word"] * self.value
        return output


@pytest.mark.parametrize("value, gradient_only", [(math.nan, False), (math.inf, False), (1.0, True)])
def test_nonfinite_loss_or_gradient_ends_run(tmp_path: Path, value: float, gradient_only: bool) -> None:
    with pytest.raises(Diverged) as caught:
        run_training(
            tmp_path / "run", FakeLoader(poison_step=7), PoisonedLearner(value, gradient_only), checkpoint_every=2
        )
    assert caught.value.exit_status == 4 and "step 7" in caught.value.message
    metadata = json.loads((tmp_path / "run/diverged/step_00000007.json").read_text())
    assert metadata["step"] == 7 and len(metadata["lengths"]) == 2
    with safe_open(tmp_path / "run/diverged/step_00000007.safetensors", "pt") as file:
        assert int(file.get_tensor("0.inputs.tokens")[0]) == 63
        assert {"0.examples", "1.targets.word.at", "1.targets.kind.labels"} <= set(file.keys())
    weights = checkpoints.read_weights(find(tmp_path / "run"))
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert read_state(tmp_path / "run/checkpoints/step_00000006")["step"] == 6
    assert not list((tmp_path / "run/checkpoints").glob("step_00000007"))


class HighLearner(FakeLearner):
    """A loss that is 200 times as high in some steps.

    Args:
        high: These steps.
        breaks: Step before which the learner raises an error.
    """

    def __init__(self, high: Collection[int], breaks: int | None = None):
        super().__init__()
        self.high, self.breaks = high, breaks

    def on_step(self, step: int) -> None:
        if step == self.breaks:
            raise RuntimeError("torn")
        self.loss_factor = 200.0 if step in self.high else 1.0


@pytest.mark.parametrize("log_every", [1, 1000])
@pytest.mark.parametrize("first", [2, 12])
def test_exploded_loss_ends_run(tmp_path: Path, log_every: int, first: int) -> None:
    """At any log_every, in early and late steps."""
    last = first + 2
    with pytest.raises(Diverged, match=rf"exploded to \d+: for 3 steps up to step {last} it was more than 30 times"):
        run_training(tmp_path / "run", learner=HighLearner(range(first, 20)), log_every=log_every)
    assert json.loads((tmp_path / f"run/diverged/step_{last:08d}.json").read_text())["step"] == last


def test_explosion_count_survives_resume(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_training(tmp_path / "run", learner=HighLearner(range(11, 20), breaks=13), checkpoint_every=2)
    with pytest.raises(Diverged, match="up to step 13 "):
        run_training(tmp_path / "run", learner=HighLearner(range(11, 20)), checkpoint_every=2)


@pytest.mark.parametrize(
    ("high", "baseline_loss"),
    [([step for step in range(20) if step % 3], 0.0), (range(20), 0.0), (range(2, 20), 100.0)],
    ids=["loss recovers", "loss starts high", "baseline loss is high"],
)
def test_high_losses_without_explosion_are_accepted(
    tmp_path: Path, high: Collection[int], baseline_loss: float
) -> None:
    result, _ = run_training(tmp_path / "run", learner=HighLearner(high), baseline_loss=baseline_loss)
    assert (result.status, result.steps) == ("done", 20)


def run_with_scores(path: Path, evaluate: Callable[[int], dict[str, float]], precision: str = "fp32") -> TrainingResult:
    """A run with these evaluation scores."""
    with open_run(path) as run:
        return train(FakeLearner(), FakeLoader(), evaluate, run, settings(precision=precision))


@pytest.mark.parametrize(
    ("precision", "hint"),
    [
        ("fp32", "use a lower optimizer.lr or a longer warm-up, and another name="),
        ("bf16", "use a lower optimizer.lr, a longer warm-up or precision=fp32, and another name="),
    ],
)
def test_nonfinite_evaluation_ends_run(tmp_path: Path, precision: str, hint: str) -> None:
    held_out = next(iter(FakeLoader(seed=9).steps(None))).batches[0]

    def evaluate(step: int) -> dict[str, float]:
        if step == 10:
            raise NotFinite("losses", held_out)
        return {"loss": 1.0}

    with pytest.raises(Diverged, match="the model's losses are not finite in the evaluation after step 10") as caught:
        run_with_scores(tmp_path / "run", evaluate, precision)
    assert caught.value.exit_status == 4 and caught.value.hint == hint
    with safe_open(tmp_path / "run/diverged/step_00000010.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("0.inputs.tokens"), held_out.inputs.tokens)
    assert find(str(tmp_path / "run")).name == "step_00000005"


def test_exploded_evaluation_ends_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="exploded to 500 in the evaluation after step 15"):
        run_with_scores(tmp_path / "run", lambda step: {"loss": 500.0 if step == 15 else 1.0})
    assert [row["loss"] for row in rows(tmp_path / "run") if row["split"] == "validation"] == [1.0, 1.0, 500.0]
    assert find(str(tmp_path / "run")).name == "step_00000005"
    assert run_with_scores(tmp_path / "score", lambda step: {"loss": 1.0, "other": 500.0}).status == "done"


@pytest.mark.parametrize(
    ("key", "value"),
    [("best_value", "x"), ("tokens", 1.5), ("cursor", {"epoch": "a"}), ("metrics", []), ("epoch", None)],
)
def test_damaged_state_counters_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    run_training(tmp_path / "run", max_steps=2)
    folder = find(str(tmp_path / "run"))
    state = {**read_state(folder), key: value}
    (folder / "state.json").write_text(json.dumps(state))
    metadata = Manifest.read(folder).metadata
    (folder / MANIFEST).unlink()
    write_manifest(folder, metadata)
    with pytest.raises(UserError, match=f"state.json is damaged: {key}=") as caught:
        run_training(tmp_path / "run", max_steps=4)
    assert caught.value.hint


def test_fp16_resume_matches_uninterrupted_run(tmp_path: Path) -> None:
    _, whole = run_training(tmp_path / "whole", precision="fp16", max_steps=6)
    state = read_state(tmp_path / "whole/checkpoints/step_00000006")
    assert state["scaler"]["scale"] > 1

    class Breaking(FakeLearner):
        def on_step(self, step: int) -> None:
            if step == 4:
                raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        run_training(tmp_path / "run", learner=Breaking(), precision="fp16", max_steps=6, checkpoint_every=2)
    _, again = run_training(tmp_path / "run", precision="fp16", max_steps=6, checkpoint_every=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_bf16_loss_is_close_to_fp32(tmp_path: Path) -> None:
    fp32, _ = run_training(tmp_path / "fp32", max_steps=20)
    bf16, _ = run_training(tmp_path / "bf16", max_steps=20, precision="bf16")
    assert bf16.precision == "bf16" and bf16.best_value == pytest.approx(fp32.best_value, rel=0.1)


def test_frozen_parameters_are_unchanged(tmp_path: Path) -> None:
    class Frozen(FakeLearner):
        def parameter_groups(self) -> Any:
            return [type(group)(group.name, [p for p in group.parameters if p[0].startswith("classify")]) for group in
                    super().parameter_groups()]  # fmt: skip

    result, learner = run_training(tmp_path / "run", learner=Frozen(), max_steps=4)
    fresh = FakeLearner()
    assert torch.equal(learner.dense.weight, fresh.dense.weight)
    assert not torch.equal(learner.classify.weight, fresh.classify.weight)
    assert result.trainable_parameters == sum(parameter.numel() for parameter in learner.classify.parameters())
    assert result.parameters == sum(parameter.numel() for parameter in learner.parameters())


def test_run_without_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no budget"):
        run_training(tmp_path / "run", max_steps=None)
    assert not (tmp_path / "run").exists()


def test_zero_learning_rate_scale_freezes_group(tmp_path: Path) -> None:
    class Scaled(FakeLearner):
        def parameter_groups(self) -> Any:
            groups = super().parameter_groups()
            groups[1].learning_rate_scale = 0.0
            return groups

    learner, fresh = Scaled(), FakeLearner()
    with open_run(tmp_path / "run") as run:
        train(
            learner,
            FakeLoader(),
            evaluator(learner),
            run,
            settings(max_steps=3, optimizer=AdamWConfig(), schedule=ConstantConfig()),
        )
    assert torch.equal(learner.dense.bias, fresh.dense.bias)
    assert not torch.equal(learner.dense.weight, fresh.dense.weight)


def test_extensions_are_called_after_every_update(tmp_path: Path) -> None:
    learner, extension = FakeLearner(), TokenizerFile("{}")
    with open_run(tmp_path / "run") as run:
        train(learner, FakeLoader(), evaluator(learner), run, settings(max_steps=3), extensions=[extension])
    assert extension.updates == [1, 2, 3]
