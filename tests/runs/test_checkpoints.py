"""Checkpoints: damage is detected, intact checkpoints are found, and a full disk costs one save only."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.errors import CheckFailed, UserError
from lmtool.runs import checkpoints
from lmtool.runs.finding import checkpoint_of_pointer, find, read_config, read_state, saved_steps, verify
from lmtool.system.files import Damaged
from lmtool.training import keeper
from lmtool.training.budgets import retained_checkpoints
from lmtool.training.configs import AdamWConfig
from lmtool.training.loop import train
from lmtool.training.optimizers import load_state_tensors, named_parameters, state_tensors
from lmtool.training.sharding import load_weights
from lmtool.training.update_rules import build_adamw
from lmtool.weights.reading import read_file
from tests.training.fakes import FakeLearner, FakeLoader, TokenizerFile, evaluator, open_run, settings, train_rows


def train_run(path: Path, learner: FakeLearner | None = None, **changes: Any) -> FakeLearner:
    learner = learner or FakeLearner()
    with open_run(path) as run:
        train(
            learner, FakeLoader(), evaluator(learner), run, settings(**changes),
            extensions=[TokenizerFile('{"words": []}')],
        )  # fmt: skip
    return learner


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with three checkpoints."""
    path = tmp_path_factory.mktemp("trained") / "run"
    train_run(path, max_steps=6, evaluate_every=2)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_checkpoint_folder_has_expected_files(trained: Path) -> None:
    folder = find(trained / "checkpoints" / "last")
    assert folder.name == "step_00000006"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "tokenizer.json", "manifest.json",
    }  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"} and manifest["format"] == 1
    assert read_config(folder)["model"]["name"] == "fake"
    state = read_state(folder)
    assert (state["step"], state["ended"]) == (6, "max_steps") and state["cursor"] == {"epoch": 1, "batch": 1}
    assert not [path for path in (trained / "checkpoints").iterdir() if path.name.startswith(".")]


def test_tied_weights_are_stored_once_and_restored(trained: Path, tmp_path: Path) -> None:
    folder = find(trained)
    weights = checkpoints.read_weights(folder)
    learner = FakeLearner(seed=5)
    load_weights(learner, weights, folder)
    assert torch.equal(learner.decode.weight, weights["embed.weight"])
    assert weights.keys() == learner.state_dict().keys()
    stored = (folder / "model.safetensors").stat().st_size
    assert stored < sum(tensor.nbytes for tensor in learner.state_dict().values())


def test_header_of_tied_weights_is_sorted(tmp_path: Path) -> None:
    """The safetensors library writes metadata in random order."""
    tensor = torch.arange(3.0)
    for number in range(8):
        path = tmp_path / f"{number}.safetensors"
        checkpoints.save_tensors({"a": tensor, "b": tensor}, path)
        assert b'{"__metadata__":{"format":"pt","tied":"{' in path.read_bytes()
        assert read_file(path).keys() == {"a"}


def test_overlapping_tensors_are_restored(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "row": base[1], "turned": base.T, "flat": base.view(-1), "empty": torch.zeros(0)}
    checkpoints.save_tensors(tensors, tmp_path / "model.safetensors")
    for name in ("state.json", "config.json"):
        (tmp_path / name).write_text("{}")
    checkpoints.write_manifest(tmp_path, {"step": 0})
    back = checkpoints.read_weights(tmp_path)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Truncate the file, flip a bit, or zero a page (part of a small file), so that its bytes change."""
    content = bytearray(path.read_bytes())
    if kind == "truncate":
        content = content[: chance.randrange(len(content))]
    elif kind == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        start = chance.randrange(0, len(content), 4096)
        end = min(start + 4096, len(content))
        if not any(content[start:end]):
            start, end = 0, min(4096, len(content))
        content[start:end] = bytes(end - start)
    path.write_bytes(bytes(content))


def test_verify_detects_200_random_damages(trained: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    source = find(trained / "checkpoints" / "last")
    files = sorted(path.name for path in source.iterdir())
    detected = 0
    for number in range(200):
        folder = tmp_path / "step_00000006"
        shutil.copytree(source, folder)
        name = files[number % len(files)]
        damage(folder / name, ("truncate", "flip", "zero")[number % 3], chance)
        with pytest.raises(Damaged) as caught:
            verify(folder)
        detected += name in str(caught.value)
        shutil.rmtree(folder)
    assert detected == 200


@pytest.mark.parametrize("kind", ["truncate", "flip", "zero"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_damaged_newest_checkpoint_is_set_aside(tmp_path: Path, name: str, kind: str) -> None:
    uninterrupted = train_run(tmp_path / "uninterrupted", checkpoint_every=2, max_steps=12, evaluate_every=6)

    class Breaking(FakeLearner):
        def on_step(self, step: int) -> None:
            if step == 9:
                raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        train_run(tmp_path / "run", Breaking(), checkpoint_every=2, max_steps=12, evaluate_every=6)
    damage(tmp_path / "run/checkpoints/step_00000008" / name, kind, random.Random(1))
    again = train_run(tmp_path / "run", checkpoint_every=2, max_steps=12, evaluate_every=6)
    assert (tmp_path / "run/checkpoints/bad-step_00000008" / name).exists()
    assert name in (tmp_path / "run/log.txt").read_text()
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), again.parameters(), strict=True))
    both = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("uninterrupted", "run")
    ]
    assert train_rows(both[0]) == train_rows(both[1])


def test_run_without_intact_checkpoint_stops(run: Path) -> None:
    for folder in saved_steps(run / "checkpoints"):
        damage(folder / "model.safetensors", "flip", random.Random(2))
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(CheckFailed, match="none of the 2 checkpoints"):
        train_run(run, max_steps=6, evaluate_every=2)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("ended", [False, True], ids=["stopped", "ended"])
@pytest.mark.parametrize("loss", ["deleted", "damaged"])
def test_lost_best_checkpoint_is_replaced_on_resume(tmp_path: Path, loss: str, ended: bool) -> None:
    """The checkpoint that the run resumes from becomes the best, until a later one has a better score."""
    path, scores = tmp_path / "run", iter([1.0, 2.0, 2.5, 2.25, 2.4, 2.4])

    class Breaking(FakeLearner):
        def on_step(self, step: int) -> None:
            if step == 7:
                raise RuntimeError("torn")

    def train_on(learner: FakeLearner) -> Any:
        with open_run(path) as run:
            return train(
                learner, FakeLoader(), lambda step: {"loss": next(scores)}, run,
                settings(max_steps=6 if ended else 10, evaluate_every=2),
            )  # fmt: skip

    if ended:
        train_on(FakeLearner())
    else:
        with pytest.raises(RuntimeError):
            train_on(Breaking())
    best = path / "checkpoints/step_00000002"
    assert checkpoint_of_pointer(path / "checkpoints", "best") == best
    if loss == "deleted":
        shutil.rmtree(best)
    else:
        damage(best / "model.safetensors", "flip", random.Random(4))
    result = train_on(FakeLearner())
    expected = (6, 2.5) if ended else (8, 2.25)
    assert (result.best_step, result.best_value) == expected
    assert result.best == path / f"checkpoints/step_{expected[0]:08d}" and result.metrics == {"loss": expected[1]}
    checkpoints.read_weights(result.best)
    assert ("it was the best checkpoint" in (path / "log.txt").read_text()) == (loss == "damaged")


# --- finding and reading -------------------------------------------------------------------------------------------


def test_find_accepts_paths_of_a_run(run: Path) -> None:
    best = checkpoint_of_pointer(run / "checkpoints", "best")
    assert best is not None
    assert find(run) == find(run / "checkpoints") == best
    assert find(run / "checkpoints" / "best") == best == find(best)
    (run.parent / "latest").write_text("run\n")
    assert find(run.parent / "latest") == best
    (run / "checkpoints" / "best").unlink()
    assert find(run).name == "step_00000006"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda place: place / "nowhere", "nowhere: no such folder"),
        (lambda place: place, "the folder contains neither an lmtool checkpoint nor a config.json of transformers"),
        (lambda place: place / "model.bin", "pickled weights can run code"),
        (lambda place: place / "notes.txt", "reads checkpoint folders"),
        (lambda place: place / "swept", "swept is a sweep, not a run"),
    ],
)
def test_find_error_names_the_problem(tmp_path: Path, make: Any, words: str) -> None:
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    for name in ("model.bin", "notes.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=words) as caught:
        find(make(tmp_path))
    assert caught.value.hint and "\n" not in caught.value.message


def test_damaged_file_error_hints_at_intact_checkpoint(run: Path) -> None:
    folder = run / "checkpoints/step_00000006"
    damage(folder / "model.safetensors", "flip", random.Random(3))
    with pytest.raises(UserError, match=r"step_00000006/model\.safetensors is damaged") as caught:
        checkpoints.read_weights(find(folder))
    assert caught.value.hint is not None and "step_00000004, which is intact" in caught.value.hint
    assert read_state(folder)["step"] == 6


def test_truncated_or_missing_file_is_refused_by_find(run: Path) -> None:
    folder = run / "checkpoints/step_00000006"
    (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json is damaged: 2 bytes"):
        find(folder)
    (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"state\.json is missing"):
        find(folder)


def test_edited_or_newer_manifest_is_refused(run: Path) -> None:
    path = run / "checkpoints/step_00000006/manifest.json"
    manifest = json.loads(path.read_text())
    changed = {**manifest, "step": 7}
    path.write_text(json.dumps(changed, indent=2))
    with pytest.raises(Damaged, match="changed after it was written"):
        verify(path.parent)
    path.write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(UserError, match="newer lmtool"):
        verify(path.parent)


def test_checkpoint_of_another_model_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"does not fit the model: .*dense\.bias is \(16,\), the model has \(32,\)"):
        train_run(run, FakeLearner(hidden=32), max_steps=6, evaluate_every=2)


def test_optimizer_state_is_loaded_by_name() -> None:
    learner, other = FakeLearner(), FakeLearner()
    groups = learner.parameter_groups()
    optimizer = build_adamw(AdamWConfig(), groups)
    for parameter in learner.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = state_tensors(optimizer, named_parameters(groups))
    reverse = other.parameter_groups()[::-1]
    for group in reverse:
        group.parameters.reverse()
    again = build_adamw(AdamWConfig(), reverse)
    load_state_tensors(again, named_parameters(reverse), saved)
    back = state_tensors(again, named_parameters(reverse))
    assert back.keys() == saved.keys() and all(torch.equal(back[key], saved[key]) for key in saved)
    with pytest.raises(UserError, match="belongs to another model"):
        load_state_tensors(again, named_parameters(reverse), {"exp_avg.nowhere": torch.zeros(1)})


# --- disk errors ---------------------------------------------------------------------------------------------------

POINTS = ["save_tensors", "write_bytes", "sync_path", "write_manifest", "rename"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("point", POINTS)
def test_failed_save_does_not_change_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: int
) -> None:
    uninterrupted = train_run(tmp_path / "uninterrupted", max_steps=8, evaluate_every=2)
    owner = os if point == "rename" else checkpoints
    real, calls = getattr(owner, point), []
    broken = {"save": 0}

    def failing(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if broken["save"] == 1:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **keywords)

    real_write = checkpoints.write_checkpoint

    def write(folder: Path, step: int, *rest: Any) -> Path:
        broken["save"] = int(step == 4)
        try:
            return real_write(folder, step, *rest)
        finally:
            broken["save"] = 0

    monkeypatch.setattr(owner, point, failing)
    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    again = train_run(tmp_path / "run", max_steps=8, evaluate_every=2)
    assert calls and all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), again.parameters(), strict=True))
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["best", "last", "step_00000006", "step_00000008"]
    for folder in saved_steps(tmp_path / "run/checkpoints"):
        verify(folder)
    assert "step 4 could not be saved" in (tmp_path / "run/log.txt").read_text()


def test_three_consecutive_failed_saves_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoints.write_checkpoint

    def write(folder: Path, step: int, *rest: Any) -> Path:
        if step > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    with pytest.raises(UserError, match="cannot write .*: no space left on device") as caught:
        train_run(tmp_path / "run", max_steps=100, evaluate_every=2)
    assert caught.value.hint is not None and "free some space" in caught.value.hint
    assert "step 10 could not be saved (failure 3 of 3)" in (tmp_path / "run/log.txt").read_text()
    assert find(tmp_path / "run").name == "step_00000004"


def test_failed_final_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*arguments: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    with pytest.raises(UserError, match="no space left"):
        train_run(tmp_path / "run", max_steps=2, evaluate_every=2)


def test_error_names_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Rows are written before the checkpoint; if that fails, the error names the rows' file."""

    class Linking(FakeLearner):
        def on_step(self, step: int) -> None:
            (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
            (tmp_path / "run" / "metrics.jsonl").symlink_to("metrics.jsonl")

    with pytest.raises(UserError, match=r"cannot write .+/metrics\.jsonl: a link is in its place"):
        train_run(tmp_path / "run", learner=Linking(), max_steps=2, evaluate_every=2)


def test_best_score_with_failed_save_is_not_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, scores = checkpoints.write_checkpoint, iter([3.0, 1.0, 2.0, 2.5])

    def write(folder: Path, step: int, *rest: Any) -> Path:
        if step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    with open_run(tmp_path / "run") as run:
        result = train(
            FakeLearner(), FakeLoader(), lambda step: {"loss": next(scores)}, run,
            settings(max_steps=8, evaluate_every=2),
        )  # fmt: skip
    assert (result.best_step, result.best_value) == (6, 2.0)
    assert result.best is not None and result.best.name == "step_00000006"


def test_save_to_missing_folder_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        checkpoints.save_tensors({"a": torch.zeros(4)}, tmp_path / "nowhere" / "model.safetensors")
    assert caught.value.errno == errno.ENOENT


def test_too_small_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(keeper.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**5))
    with pytest.raises(UserError, match=r"has 0\.1 MB free; the checkpoints of this run need 1\.\d MB"):
        train_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, kept",
    [
        ({}, [4, 9, 10]),  # the best and the two newest
        ({"keep": 1}, [4, 10]),
        ({"keep": "all"}, list(range(1, 11))),
        ({"keep_every": 3}, [3, 4, 6, 9, 10]),
        ({"keep": 1, "keep_every": 3, "checkpoint_every": 5}, [3, 4, 6, 9, 10]),  # saved because of keep_every
    ],
)
def test_keep_settings_retain_expected_checkpoints(tmp_path: Path, change: dict[str, Any], kept: list[int]) -> None:
    learner = FakeLearner()
    asked = settings(**{"max_steps": 10, "evaluate_every": 2, "checkpoint_every": 1, **change})
    with open_run(tmp_path / "run") as run:
        train(
            learner, FakeLoader(), lambda step: {"loss": float(abs(step - 4))}, run, asked
        )  # fmt: skip
    assert [int(path.name[5:]) for path in reversed(saved_steps(tmp_path / "run/checkpoints"))] == kept
    assert retained_checkpoints(asked, 10) >= len(kept)


def test_retained_checkpoints_follows_keep_settings() -> None:
    assert retained_checkpoints(settings(evaluate_every=None), 1000) == retained_checkpoints(settings(), math.inf) == 3
    assert retained_checkpoints(settings(evaluate_every=None, keep="all"), 1000) == 10
    assert retained_checkpoints(settings(evaluate_every=100, checkpoint_every=250, keep="all"), 1000) == 12
    assert retained_checkpoints(settings(evaluate_every=None, keep_every=300), 1000) == 6
    assert retained_checkpoints(settings(), 1) == 1
