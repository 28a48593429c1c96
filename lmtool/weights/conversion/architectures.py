"""`lmtool import model=`: a pretrained checkpoint's weights in another family, tensor by tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from lmtool.errors import CheckFailed, UserError
from lmtool.reporting.console import Output
from lmtool.resolver.schema.run import ImportConfig
from lmtool.session.trained import classifies
from lmtool.system.secrets import masked
from lmtool.weights.comparing import ROUNDING
from lmtool.weights.crossing import Crossing, crossed, largest_difference
from lmtool.weights.exporting import require_new
from lmtool.weights.folders import published_folder
from lmtool.weights.importing import write_import
from lmtool.weights.load import load
from lmtool.weights.reading import read

REPORT = "crossed.json"
_KIND = {"Full": "every token sees the whole text", "Causal": "a token sees itself and what is before it"}


def cross(config: ImportConfig, family: str) -> None:
    """Write the checkpoint in the family, read it again, and print what became of each tensor.

    UserError where the checkpoint was tuned, and where the family computes with other blocks.
    """
    for key in ("tokenizer", "data"):
        if getattr(config, key) is not None:
            raise UserError(
                f"model={family} and {key}={getattr(config, key)}: one of them at a time", "import what comes out again"
            )
    folder = Path(config.output).expanduser()
    require_new(folder)
    published = published_folder(config.checkpoint, config.offline)
    loaded, weights = load(config.checkpoint, offline=config.offline), read(config.checkpoint, config.offline)
    tuned = loaded.saved.get("tuning") or loaded.saved.get("task")
    if tuned or (published is not None and classifies(published, weights)):
        raise UserError(
            f"model={family}: checkpoint={config.checkpoint} was finetuned",
            "give the pretrained checkpoint, and finetune what comes out",
        )
    crossing = crossed(loaded.model.parts, family, weights.tensors)
    tensors = crossing.model.state_dict()
    source = {"checkpoint": config.checkpoint, "revision": weights.revision}
    report = {REPORT: {"checkpoint": masked(config.checkpoint), "model": family, **crossing.plain()}}
    write_import(tensors, crossing.config, loaded.tokenizer, source, folder, further=report)

    again = load(str(folder), offline=True).model.parts.state_dict()
    same = again.keys() == tensors.keys() and all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    difference = largest_difference(loaded.model.parts, crossing)
    _tell(folder, loaded.config.name, crossing, difference)
    if not same or not difference < ROUNDING:
        raise CheckFailed(f"{folder} is not what was written", "see the disk, and keep the checkpoint")


def _tell(folder: Path, before: str, crossing: Crossing, difference: float) -> None:
    output = Output()
    output.line(f"{folder} · model={crossing.config.name} with the weights of model={before}")
    rows = [("taken", _these(crossing.taken))]
    rows += [("resized", f"{name}: {how}") for name, how in crossing.resized.items()]
    rows += [("new", f"{_these(crossing.new)}: zero")] if crossing.new else []
    rows.append(("left out", _these(crossing.left_out)))
    sample = "a text of the same tokens"
    if crossing.masks is not None:
        rows.append(("mask", " · was: ".join(_KIND.get(mask, mask) for mask in reversed(crossing.masks))))
        sample = "texts of one token"
    rows.append(("states", f"largest difference {difference:.3g} over {sample}"))
    output.rows(rows)


def _these(names: Iterable[str]) -> str:
    """The modules that tensors belong to, those of all layers once, and how many they are."""
    counts = Counter(re.sub(r"layers\.\d+", "layers.*", name.rpartition(".")[0]) for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "nothing"
