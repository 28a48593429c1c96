"""Pretraining on the texts of a task, the recorded lineage of checkpoints, and domain adaptation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lmtool.cli import main as cli
from tests.commands.conftest import TINY, finetune


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def test_lineage_records_chain_from_task_texts(place: Path) -> None:
    texts = ["pretrain", "data=task:sst2", "data.task.path=rows", "objective.pairs=none", "cache_dir=cache"]
    run = Path("runs/adapted")
    words = [*texts, "model=bert_tiny", *TINY, "batch_tokens=256", "max_steps=2", "name=adapted"]
    assert cli.main(words) == 0
    assert "lineage" not in result_of(run)
    metadata = json.loads((run / "facts.json").read_text())["data"]
    assert metadata["source"] == "texts of sst2" and not metadata["held_out"]
    assert (metadata["documents"], metadata["validation_documents"]) == (96, 40)
    task = finetune("task", "checkpoint=runs/adapted", "max_steps=1")
    further = finetune("further", "checkpoint=runs/task", "max_steps=2", "checkpoint_every=1")
    manifest = json.loads(next((run / "checkpoints").glob("step_00000002/manifest.json")).read_text())
    (first,) = result_of(task)["lineage"]
    assert first["checkpoint"] == "runs/adapted" and first["step"] == 2
    assert first["sha256"] == manifest["files"]["model.safetensors"]["sha256"]
    assert first["command"].startswith("lmtool ")
    chain = result_of(further)["lineage"]
    assert chain[0] == first and [entry["checkpoint"] for entry in chain] == ["runs/adapted", "runs/task"]
    metadata = json.loads((further / "facts.json").read_text())
    assert metadata["lineage"] == chain and metadata["model"]["started_from"] == "runs/adapted → runs/task"
    # The lineage remains after the source runs are deleted.
    shutil.rmtree("runs/adapted")
    shutil.rmtree("runs/task")
    shutil.rmtree(further / "checkpoints/step_00000002")
    (further / "result.json").unlink()
    (further / "checkpoints/best").unlink(missing_ok=True)
    assert cli.main(["resume", str(further)]) == 0
    assert result_of(further)["lineage"] == chain


def test_task_texts_are_held_out_and_deduplicated(place: Path) -> None:
    lines = Path("rows/train.tsv").read_text().splitlines()
    Path("alone.tsv").write_text("\n".join([*lines, *lines[1:20]]) + "\n")
    task = "data.task={kind: classification, text: [sentence], label: gone, path: alone.tsv}"
    words = ["pretrain", "model=bert_tiny", *TINY, "data=task", task, "objective.pairs=none", "cache_dir=cache"]
    assert cli.main([*words, "batch_tokens=256", "max_steps=1", "name=run"]) == 0
    run = Path("runs/run")
    metadata = json.loads((run / "facts.json").read_text())["data"]
    assert metadata["held_out"] and metadata["documents"] + metadata["validation_documents"] == 96


def test_domain_adaptation_resumes_and_evaluates(place: Path) -> None:
    """Target texts have no labels, and evaluation and prediction do not need them."""
    lines = Path("rows/dev.tsv").read_text().splitlines()
    Path("other.tsv").write_text("\n".join(line.split("\t")[0] for line in lines) + "\n")
    sizes = [word for word in TINY if word.startswith("model.")]
    words = ["checkpoint=none", "model=bert_tiny", *sizes, "task.domain=dann", "task.domain.target=other.tsv"]
    run = finetune("run", *words, "max_steps=3", "log_every=1", "checkpoint_every=1")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["loss_sst2_domain"] < 2 for row in rows if row["split"] == "train")
    assert json.loads((run / "facts.json").read_text())["data"]["target_rows"] == 40
    last = run / "checkpoints/step_00000003/model.safetensors"
    whole = last.read_bytes()
    shutil.rmtree(last.parent)
    (run / "result.json").unlink()
    finetune("run", *words, "max_steps=3", "log_every=1", "checkpoint_every=1")
    assert last.read_bytes() == whole
    Path("other.tsv").unlink()
    assert cli.main(["evaluate", "checkpoint=runs/run", "cache_dir=cache", "device=cpu"]) == 0
    assert cli.main(["predict", "checkpoint=runs/run", "text=a film", "device=cpu"]) == 0
