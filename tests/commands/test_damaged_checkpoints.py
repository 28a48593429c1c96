"""Every kind of damage to every file of a checkpoint, for every command that reads one: the command reports a
fallback, refuses the file by name, or does not read the file and gives the same result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmtool
from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.session import fit as training
from lmtool.training.loop import train
from tests.breadth import slow_but
from tests.commands.conftest import finetune, pretrain, skip_reports, work_in_copy, write_rows, write_text

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json", "data.json", *TOKENIZER)
# Files that only resume reads; other commands check just presence and size against the manifest.
UNREAD = ("optimizer.safetensors", "state.json", "data.json")
BEST = "step_00000004"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "bit flip": flip_bit,
    "empty": lambda path: path.write_bytes(b""),
}
READERS = ("predict", "evaluate", "export", "finetune")
# One kind of damage to every file, and all kinds to one file and the manifest.
CELLS = slow_but(
    [
        (name, damage)
        for name in (*FILES, "manifest.json")
        for damage in DAMAGES
        if damage == "bit flip" or name not in FILES[1:]
    ],
    [(name, damage) for name in (*FILES, "manifest.json") for damage in DAMAGES],
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with text and a finished run of two checkpoints, the later one the best."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder / "text.txt")
    write_rows(folder / "rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        skip_reports(patch)
        pretrain("run", "objective=mlm", "max_steps=4", "evaluate_every=2", "optimizer.lr=1e-3")
        assert Path("runs/run/checkpoints/best").read_text().strip() == BEST
        yield folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage."""
    work_in_copy(trained, tmp_path, monkeypatch)
    return Path("runs/run")


def run_command(command: str, checkpoint: object, output: str) -> int:
    """Runs a command on a checkpoint, with its result in the file or folder `output`."""
    words = {
        "predict": ["text=The kind [MASK] saw the [MASK].", "device=cpu", "precision=fp32"],
        "evaluate": ["cache_dir=cache", "device=cpu", "precision=fp32"],
        "export": [],
        "finetune": ["task=sst2", "task.path=rows", "cache_dir=cache", "max_steps=1", "device=cpu", "precision=fp32"],
    }  # fmt: skip
    place = {"evaluate": [], "finetune": [f"run_dir={output}"]}.get(command, [f"output={output}"])
    return cli.main([command, f"checkpoint={checkpoint}", *words[command], *place])


def result_of(output: str, screen: str) -> bytes:
    """The result of a command: its file, the weights in its folder, or its screen."""
    path = Path(output)
    if path.is_file():
        return path.read_bytes()
    weights = sorted(path.rglob("model.safetensors"))
    return weights[-1].read_bytes() if weights else screen.encode()


@pytest.fixture(scope="module")
def undamaged(trained: Path) -> dict[str, bytes]:
    import contextlib
    import io

    results = {}
    for command in READERS:
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            assert run_command(command, "runs/run", f"whole_{command}") == 0
        results[command] = result_of(f"whole_{command}", screen.getvalue())
    return results


@pytest.mark.parametrize(("name", "damage"), CELLS)
def test_commands_refuse_or_ignore_damaged_files(
    run: Path, undamaged: dict[str, bytes], name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / BEST / name
    DAMAGES[damage](path)
    for command in READERS:
        status = run_command(command, run, command)
        screen = capsys.readouterr()
        if name in UNREAD and damage == "bit flip":
            assert status == 0 and result_of(command, screen.out) == undamaged[command], command
            continue
        assert status == 2 and f"error: {path} " in screen.err, (command, screen.err)
        assert "hint: use runs/run/checkpoints/step_00000002, which is intact" in screen.err
        assert "Traceback" not in screen.err and not Path(command).exists()
    if name not in UNREAD or damage != "bit flip":
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            lmtool.load(str(run))
    if damage == "deleted":  # the hint works
        assert run_command("predict", run / "checkpoints/step_00000002", "other") == 0


@pytest.mark.parametrize(("name", "damage"), CELLS)
def test_run_resumes_from_previous_intact_checkpoint(
    run: Path, trained: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "result.json").unlink()
    path = run / "checkpoints" / BEST / name
    DAMAGES[damage](path)
    assert cli.main(["resume", str(run)]) == 0
    screen = capsys.readouterr().out
    assert f"warning: {path} " in screen
    assert f"set aside as bad-{BEST}, the run resumes from step_00000002" in screen
    for file in ("model.safetensors", "optimizer.safetensors", "tokenizer.json"):
        whole = trained / "runs/run/checkpoints" / BEST / file
        assert (run / "checkpoints" / BEST / file).read_bytes() == whole.read_bytes()
    values = [json.loads((folder / "runs/run/result.json").read_text())["value"] for folder in (trained, Path())]
    assert values[0] == values[1]


def test_run_without_intact_checkpoint_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    for folder in (run / "checkpoints").glob("step_*"):
        flip_bit(folder / "tokenizer.json")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert cli.main(["resume", str(run)]) == 3
    error = capsys.readouterr().err
    assert "none of the 2 checkpoints in runs/run/checkpoints is intact" in error and "tokenizer.json" in error
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    assert run_command("predict", run, "x") == 2
    assert "hint: copy it again" in capsys.readouterr().err


def test_best_checkpoint_damaged_during_run_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(*arguments: Any, **keywords: Any) -> Any:
        result = train(*arguments, **keywords)
        assert result.best.name == "step_00000002" and result.last.name == "step_00000004"
        flip_bit(result.best / "model.safetensors")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", trained)
        pretrain("worse", "objective=mlm", "max_steps=4", "evaluate_every=2", "optimizer.lr=0.9", status=2)
    error = capsys.readouterr().err
    assert "error: runs/worse/checkpoints/step_00000002/model.safetensors is damaged" in error
    assert "hint: run lmtool resume runs/worse, which ignores this checkpoint" in error
    assert cli.main(["resume", "runs/worse"]) == 0
    assert "it was the best checkpoint, set aside as bad-step_00000002" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("runs/worse/metrics.jsonl").read_text().splitlines()]
    result = json.loads(Path("runs/worse/result.json").read_text())
    assert result["best_step"] == 4 and result["value"] == rows[-1]["loss"] == result["metrics"]["loss"]


def test_tokenizer_of_damaged_checkpoint_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tokenizer.path=` of a run refuses damaged and additional tokenizer files."""
    folder = run / "checkpoints" / BEST
    words = ["tokenizer=folder", "objective=mlm", "max_steps=1"]
    for number, path in enumerate((run, folder, run / "checkpoints/best")):
        pretrain(f"good{number}", *words, f"tokenizer.path={path}")
    (folder / "added_tokens.json").write_text('{"cat": 5}')
    for path in (run, folder):
        pretrain("other", *words, f"tokenizer.path={path}", status=2)
        assert f"error: {folder / 'added_tokens.json'} is not in manifest.json" in capsys.readouterr().err
    (folder / "added_tokens.json").unlink()
    (folder / "manifest.json").unlink()
    flip_bit(folder / "tokenizer.json")
    pretrain("other", *words, f"tokenizer.path={folder}", status=2)
    assert f"error: {folder / 'manifest.json'} is missing" in capsys.readouterr().err
    finetune("labels", f"checkpoint={folder}", "max_steps=1", status=2)
    assert f"error: {folder / 'manifest.json'} is missing" in capsys.readouterr().err
