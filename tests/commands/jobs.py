"""Jobs for the kill harness that run real commands; imported by name in a separate process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.commands import finetune, pretrain  # noqa: F401 imported here, not in each victim
from lmtool.config.registry import entries
from tests.commands.conftest import TINY, merge_overrides, skip_reports, tiny, write_rows, write_text

torch.set_num_threads(1)

BUDGET = ["max_steps=12", "checkpoint_every=1", "evaluate_every=5", "log_every=1"]


def _shared(folder: Path) -> Path:
    """The folder of text, rows and caches that all runs of a harness share."""
    place = folder.parent / "shared"
    if not place.exists():
        place.mkdir()
        write_text(place / "text.txt")
        write_rows(place / "rows")
    return place


def _quietly(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main(merge_overrides(words))
    if status:
        raise SystemExit(status)


def prepare() -> None:
    """Imports modules for composing before the harness forks, and turns off reports, which outcomes exclude."""
    skip_reports(pytest.MonkeyPatch())
    _quietly("pretrain", "--cfg", "job")


def pretraining(folder: Path, model: str = "bert_tiny", more: Sequence[str] = ()) -> None:
    place = _shared(folder)
    _quietly(
        "pretrain", f"model={model}", *tiny(model), *BUDGET, "batch_tokens=256", "data=text",
        f"data.path={place / 'text.txt'}", f"cache_dir={place / 'cache'}", f"run_dir={folder}", *more,
    )  # fmt: skip


def multitask(folder: Path) -> None:
    """Text and two tasks; an epoch ends during the run, and the next one has a new order."""
    place = _shared(folder)
    rows = place / "rows"
    tasks = ",".join(
        f"{{name: task, task: {{kind: {kind}, name: {kind}, path: {rows}, text: [sentence]}}}}"
        for kind in ("classification", "regression")
    )
    _quietly(
        "pretrain", "model=bert_tiny", *TINY, *BUDGET, "batch_examples=40", "batch_tokens=null", "data=text",
        f"data.path={place / 'text.txt'}", f"cache_dir={place / 'cache'}", f"run_dir={folder}", "objective=mixture",
        f"objective.members=[mlm,{tasks}]",
    )  # fmt: skip


def two_stages(folder: Path) -> None:
    """Replaced-token detection in two stages: the generator for three steps, then the model from its weights."""
    place = _shared(folder)
    _quietly(
        "pretrain", "model=electra_tiny", *TINY, *BUDGET, "max_steps=6", "batch_tokens=256", "data=text",
        "objective.training=two_stage", "objective.generator_steps=3", "objective.generator_size=1",
        f"data.path={place / 'text.txt'}", f"cache_dir={place / 'cache'}", f"run_dir={folder}",
    )  # fmt: skip


def finetuning(folder: Path) -> None:
    place = _shared(folder)
    _quietly(
        "finetune", "model=bert_tiny", *TINY, *BUDGET, "checkpoint=none", "task=sst2", f"task.path={place / 'rows'}",
        "batch_examples=16", "max_epochs=null", f"cache_dir={place / 'cache'}", f"run_dir={folder}",
    )  # fmt: skip


def branching(folder: Path) -> None:
    """A branch in the middle of a run, with another budget."""
    trunk = folder.parent / "shared/start"
    if not trunk.exists():
        place = _shared(folder)
        _quietly(
            "pretrain", "model=bert_tiny", *TINY, *BUDGET, "batch_tokens=256", "data=text", "keep=all", "schedule=wsd",
            f"data.path={place / 'text.txt'}", f"cache_dir={place / 'cache'}", f"run_dir={trunk}",
        )  # fmt: skip
    _quietly("pretrain", f"branch={trunk}@6", f"run_dir={folder}", "max_steps=14", "schedule.decay_steps=6")


def tuning(folder: Path) -> None:
    """LoRA on a pretrained model with gradual unfreezing."""
    place, start = _shared(folder), folder.parent / "shared/start"
    if not start.exists():
        pretraining(start)
    _quietly(
        "finetune", f"checkpoint={start}", *BUDGET, "task=sst2", f"task.path={place / 'rows'}", "max_length=32",
        "tuning=lora", "tuning.dropout=0.1", "tuning.schedule=gradual_unfreezing", "tuning.schedule.every_steps=2",
        "batch_examples=16", "max_epochs=null", f"cache_dir={place / 'cache'}", f"run_dir={folder}",
    )  # fmt: skip


def peers(folder: Path) -> None:
    """Codistillation: two learners, each from copies of the other that are at most two steps old."""
    place = _shared(folder)
    _quietly(
        "finetune", "model=bert_tiny", *TINY, *BUDGET, "checkpoint=none", "task=sst2", f"task.path={place / 'rows'}",
        "distill=codistillation", "distill.burn_in_steps=3", "distill.refresh_steps=2", "batch_examples=16",
        "max_epochs=null", f"cache_dir={place / 'cache'}", f"run_dir={folder}",
    )  # fmt: skip


FAMILIES = [
    entry.name for entry in entries("model") if entry.config.__module__.startswith("lmtool.") and entry.name != "auto"
]
OWN = {
    "bigbird": ["model.block_size=4", "max_length=64"],  # its pattern is dense below 44 tokens
    "xlnet": ["model.memory_length=24", "objective.reuse=8"],  # no memory by default
}
"""Overrides by family that turn on the family's special features in a run of this size."""

# One job per family across an epoch boundary, where the order and carried states start anew.
globals().update(
    {
        name: partial(pretraining, model=f"{name}_tiny", more=["batch_tokens=1024", *OWN.get(name, ())])
        for name in FAMILIES
    }
)
