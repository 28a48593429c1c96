"""Models that an earlier lmtool trained keep computing what they did, though a key of theirs is newer than they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import lmtool
from lmtool.cli import main as cli
from lmtool.system.files import MANIFEST, Manifest, write_manifest
from tests.commands.conftest import pretrain

MODELS = {
    "rnn_attention": ("reset", "after", "before"),
    "bigbird": ("random_plan", "transformers", "uniform"),
}
BLOCKS = ["model.block_size=2", "model.random_blocks=1"]  # short texts have random blocks, too


def without_key(run: Path, key: str) -> None:
    """Removes a model's key from all files of a run, as if it had been trained before the key existed."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    del saved["model"][key]
    (run / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    for folder in (run / "checkpoints").glob("step_*"):
        config = json.loads((folder / "config.json").read_text())
        del config["model"][key]
        (folder / "config.json").write_text(json.dumps(config))
        metadata = Manifest.read(folder).metadata
        (folder / MANIFEST).unlink()
        write_manifest(folder, metadata)


@pytest.mark.parametrize("family", MODELS)
def test_earlier_run_keeps_its_form(place: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    key, earlier, published = MODELS[family]
    blocks = BLOCKS if family == "bigbird" else []
    run = pretrain(
        "run", f"model.{key}={earlier}", "max_steps=4", "checkpoint_every=2", *blocks, model=f"{family}_tiny"
    )
    last = run / "checkpoints/step_00000004"
    weights, result = (last / "model.safetensors").read_bytes(), json.loads((run / "result.json").read_text())
    without_key(run, key)

    assert getattr(lmtool.load("runs/run").model.parts.backbone.config, key) == earlier
    begun = cli.parse(["checkpoint=runs/run", "data=text", "data.path=text.txt", "max_steps=1"])
    assert getattr(cli.configuration("pretrain", begun, running=False).model, key) == earlier
    new = cli.parse(["data=text", "data.path=text.txt", f"model={family}_tiny"])
    assert getattr(cli.configuration("pretrain", new, running=False).model, key) == published
    saved = cli.parse(["--config", "runs/run/config.yaml"])
    assert getattr(cli.configuration("pretrain", saved, running=False).model, key) == earlier

    shutil.rmtree(last)
    (run / "result.json").unlink()
    assert cli.main(["resume", str(run)]) == 0
    assert (last / "model.safetensors").read_bytes() == weights
    assert json.loads((run / "result.json").read_text())["metrics"] == result["metrics"]
