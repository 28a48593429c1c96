"""Checkpoints of tuned runs contain only weights that their base lacks, and work with that base only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import lmtool
from lmtool.cli import main as cli
from lmtool.models import bert
from lmtool.models.configs import BertConfig
from lmtool.session import preparation
from lmtool.system.files import write_manifest
from lmtool.weights.reading import read
from tests.commands.conftest import finetune, pretrain, skip_reports, work_in_copy, write_rows, write_text
from tests.weights.published_folders import make

RUN = ("checkpoint=runs/base", "max_steps=4", "checkpoint_every=2", "evaluate_every=4", "optimizer.lr=0.05")
TUNED, HEAD = ("tuning=lora", "tuning.rank=2", *RUN), ("tuning=head", *RUN)
LAST = Path("checkpoints/step_00000004")
ASK = ("device=cpu", "precision=fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs/base, a pretrained encoder, and runs/low, which is LoRA on it."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        skip_reports(patch)
        write_text(folder / "text.txt")
        write_rows(folder / "rows")
        pretrain("base", "objective=mlm", "max_steps=2")
        finetune("low", *TUNED)
        yield folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder that cannot read the original."""
    place = work_in_copy(trained, tmp_path / "copy", monkeypatch)
    for file in (place / "runs/low/checkpoints").glob("*/base.json"):
        assert str(trained) in file.read_text()
    monkeypatch.setattr("lmtool.weights.base.Base.addresses", property(lambda base: [base.checkpoint]))
    return place


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


def remove_last_checkpoint(name: str = "low") -> None:
    """Restores the state after the first checkpoint, like a killed run, so that `lmtool resume` has steps left."""
    shutil.rmtree(Path("runs") / name / LAST)
    (Path("runs") / name / "result.json").unlink()


def predictions(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    run("evaluate", f"checkpoint={checkpoint}", *ASK, "output=out.jsonl")
    return Path("out.jsonl").read_text()


def test_tuned_checkpoint_contains_only_added_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, base = (
        load_file(Path("runs/low") / LAST / "model.safetensors"),
        load_file(Path("runs/base/checkpoints/step_00000002/model.safetensors")),
    )
    updates = {f"backbone.layers.0.self_attn.{name}_proj.lora_{side}" for name in "qv" for side in "ab"}
    assert {name for name in own if name.startswith("backbone.")} == updates and "heads.sst2.output.weight" in own
    optimizer = load_file(Path("runs/low") / LAST / "optimizer.safetensors")
    assert optimizer and all(name.partition(".")[2] in own for name in optimizer)
    saved = json.loads((Path("runs/low") / LAST / "base.json").read_text())
    assert saved["checkpoint"] == "runs/base" and saved["parts"] == ["backbone"] and len(saved["sha256"]) == 64
    loaded = lmtool.load("runs/low")
    assert saved["tokenizer"] == loaded.tokenizer.fingerprint
    state = loaded.model.parts.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in own.items())
    backbone = [name for name in base if name.startswith("backbone.")]
    assert backbone and all(torch.equal(state[name], base[name]) for name in backbone)
    assert state.keys() == {*own, *backbone} and own["backbone.layers.0.self_attn.q_proj.lora_b"].any()
    result = json.loads(Path("runs/low/result.json").read_text())
    assert result["base"] == "runs/base"
    assert result["delta_bytes"] == (Path("runs/low") / LAST / "model.safetensors").stat().st_size < 10_000
    assert sum(tensor.nbytes for tensor in own.values()) < 0.1 * sum(tensor.nbytes for tensor in state.values())
    assert predictions("runs/low", capsys) == Path("runs/low/predictions.jsonl").read_text()
    assert "kB in addition to runs/base" in Path("runs/low/log.txt").read_text()


def test_commands_read_tuned_checkpoint_with_its_updates(place: Path) -> None:
    run("predict", "checkpoint=runs/low", "text=A lovely cat.", *ASK)
    run("probe", "checkpoint=runs/low", "target=sst2", "task.path=rows", "examples=20", "held_out=20", *ASK)
    run("embed", "checkpoint=runs/low", "text=A lovely cat.", *ASK, "output=low.npy")
    run("embed", "checkpoint=runs/base", "text=A lovely cat.", *ASK, "output=base.npy", "pooling=first")
    assert not np.allclose(np.load("low.npy"), np.load("base.npy"))


def test_plan_shows_smaller_checkpoints_for_lora(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def kilobytes(tuning: str) -> float:
        capsys.readouterr()
        run("plan", "finetune", "task=sst2", "task.path=rows", "checkpoint=runs/base", f"tuning={tuning}")
        found = re.search(r"([\d.]+) (kB|MB) per checkpoint", capsys.readouterr().out)
        assert found
        return float(found[1]) * {"kB": 1, "MB": 1000}[found[2]]

    assert kilobytes("lora") < 0.1 * kilobytes("full")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 5}, "base.json: parts: Input should be a valid tuple"),
        ({"sha256": None}, "base.json: sha256: Input should be a valid string"),
        ({"checkpoint": "~nobody/\0"}, "but there is no"),
        ({"checkpoint": "runs/low"}, "is its own base"),
    ],
)
def test_invalid_base_file_is_refused(
    change: dict[str, object], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("runs/low") / LAST
    plain = json.loads((folder / "base.json").read_text())
    (folder / "base.json").write_text(json.dumps({**plain, **change}))
    (folder / "manifest.json").unlink()
    write_manifest(folder, {"step": 4})
    capsys.readouterr()
    run("predict", "checkpoint=runs/low", "text=x", status=2)
    assert message in capsys.readouterr().err


USES = [("predict", "checkpoint=runs/low", "text=x"), ("resume", "runs/low")]


@pytest.mark.parametrize("command", USES)
def test_missing_base_is_refused(command: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_last_checkpoint()
    Path("runs/base").rename("elsewhere")
    run(*command, status=2)
    error = capsys.readouterr().err
    assert "needs the weights of runs/base, on which it was tuned, but there is no" in error
    assert "ln -s FOLDER runs/base" in error


@pytest.mark.parametrize("command", USES)
def test_base_is_found_through_a_link(command: tuple[str, ...], place: Path) -> None:
    remove_last_checkpoint()
    Path("runs/base").rename("elsewhere")
    Path("runs/base").symlink_to(place / "elsewhere")
    run(*command)


def test_changed_base_is_refused_with_both_hashes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = json.loads((Path("runs/low") / LAST / "base.json").read_text())["sha256"][:16]
    remove_last_checkpoint()
    shutil.rmtree("runs/base")
    pretrain("base", "objective=mlm", "max_steps=2", "seed=1")
    for command in USES:
        capsys.readouterr()
        run(*command, status=2)
        error = capsys.readouterr().err
        now = re.search(r"is now ([0-9a-f]{16})", error)
        assert f"sha256 was {saved}" in error and now and now[1] != saved and "restore runs/base" in error


def test_killed_tuned_run_resumes_bit_for_bit(place: Path) -> None:
    alone = {name: (Path("runs/low") / LAST / name).read_bytes() for name in ("model.safetensors", "base.json")}
    moments = load_file(Path("runs/low") / LAST / "optimizer.safetensors")
    remove_last_checkpoint()
    run("resume", "runs/low")
    assert (Path("runs/low") / LAST / "model.safetensors").read_bytes() == alone["model.safetensors"]
    again = load_file(Path("runs/low") / LAST / "optimizer.safetensors")
    assert again.keys() == moments.keys() and all(torch.equal(again[name], moments[name]) for name in moments)
    saved = json.loads((Path("runs/low") / LAST / "base.json").read_text())
    before = json.loads(alone["base.json"])
    assert saved == {**before, "path": str(place / "runs/base/checkpoints/step_00000002")}


def test_tuned_run_is_exported_merged_and_as_delta(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = predictions("runs/low", capsys)
    run("export", "checkpoint=runs/low", "output=complete")
    run("export", "checkpoint=runs/low", "output=alone", "format=delta")
    assert "without the weights of runs/base" in capsys.readouterr().out
    assert {"model.safetensors", "base.json", "tokenizer.json"} <= {file.name for file in Path("alone").iterdir()}
    assert not Path("alone/optimizer.safetensors").exists()
    assert predictions("alone", capsys) == expected
    shutil.rmtree("runs")
    run("predict", "checkpoint=complete", "text=A lovely cat.", *ASK)
    run("predict", "checkpoint=alone", "text=A lovely cat.", *ASK, status=2)


def test_merged_weights_match_the_tuned_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("export", "checkpoint=runs/low", "output=complete")
    loaded = lmtool.load("runs/low")
    theirs = AutoModelForSequenceClassification.from_pretrained("complete").eval()
    rows = loaded.tokenizer(["The happy cat saw the ship.", "A sad king."])
    with torch.no_grad():
        assert torch.allclose(theirs(**rows).logits, loaded.model(**rows).logits, atol=1e-5)
    base = AutoModelForSequenceClassification.from_pretrained("complete").eval()
    base.load_state_dict({**base.state_dict(), **their_backbone("runs/base")}, strict=False)
    with torch.no_grad():
        assert not torch.allclose(base(**rows).logits, theirs(**rows).logits, atol=1e-4)


def their_backbone(checkpoint: str) -> dict[str, torch.Tensor]:
    """BERT's backbone with the tensor names of transformers."""
    published = bert.HF_FORMAT.to_hf(read(checkpoint).tensors, BertConfig())
    return {name: tensor for name, tensor in published.items() if "encoder" in name}


def test_tuned_run_can_be_finetuned(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start with merged LoRA is in no file, so checkpoints are complete; a start with only a new head is a base."""
    finetune("on", *TUNED, "checkpoint=runs/low", "seed=1")
    assert not (Path("runs/on") / LAST / "base.json").exists()
    assert predictions("runs/on", capsys) == Path("runs/on/predictions.jsonl").read_text()
    finetune("head", *HEAD)
    finetune("further", *HEAD, "checkpoint=runs/head", "seed=1")
    assert json.loads((Path("runs/further") / LAST / "base.json").read_text())["checkpoint"] == "runs/head"
    assert predictions("runs/further", capsys) == Path("runs/further/predictions.jsonl").read_text()
    run("export", "checkpoint=runs/base", "output=x", "format=delta", status=2)
    assert "checkpoint=runs/base is complete" in capsys.readouterr().err


def test_runs_without_base_have_complete_checkpoints(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from random weights, and runs of an older lmtool with complete checkpoints, need no base."""
    finetune("random", *TUNED, "checkpoint=none", "model=bert_tiny", "model.num_layers=1", "model.vocab_size=400")
    assert not (Path("runs/random") / LAST / "base.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "base_of", lambda *given: None)
        finetune("older", *TUNED)
    whole = load_file(Path("runs/older") / LAST / "model.safetensors")
    assert not (Path("runs/older") / LAST / "base.json").exists() and "backbone.embed.token.weight" in whole
    own = load_file(Path("runs/low") / LAST / "model.safetensors")
    assert own and all(torch.equal(whole[name], tensor) for name, tensor in own.items())
    remove_last_checkpoint("older")
    Path("runs/base").rename("elsewhere")
    run("predict", "checkpoint=runs/older", "text=x", *ASK)
    run("resume", "runs/older")
    again = load_file(Path("runs/older") / LAST / "model.safetensors")
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


def test_hub_base_is_pinned_to_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    first, second = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
    snapshots, refs = (tmp_path / "hub/models--some--bert" / name for name in ("snapshots", "refs"))
    make("bert", snapshots / first)
    refs.mkdir()
    (refs / "main").write_text(first)
    finetune("low", *TUNED, "checkpoint=hf://some/bert", "offline=true", "max_length=24", "max_steps=2")
    saved = json.loads(Path("runs/low/checkpoints/step_00000002/base.json").read_text())
    assert (saved["checkpoint"], saved["revision"], saved["path"]) == ("hf://some/bert", first, None)
    # The branch moves on; the tuned run keeps its commit.
    make("electra", snapshots / second)
    (refs / "main").write_text(second)
    run("predict", "checkpoint=runs/low", "text=x", "offline=true", *ASK)
    shutil.rmtree(snapshots / first)
    run("predict", "checkpoint=runs/low", "text=x", "offline=true", *ASK, status=2)
    assert f"some/bert@{first}" in capsys.readouterr().err
