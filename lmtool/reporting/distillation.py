"""What a distilled run says of its teacher and its student: both side by side, with the same student without a teacher
where a run of it stands beside this one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from lmtool.config import saved
from lmtool.config.plugins import command_line
from lmtool.errors import UserError
from lmtool.reporting import html
from lmtool.reporting.run_files import RunFiles, read_run
from lmtool.reporting.text import count, percent, plain, title

ALONE = "student without a teacher"
# Sections and keys in which the same student without a teacher differs.
_DIFFERING = ("distill", "name", "run_dir", "checkpoint_every")
_CELL = {"side", "student_layer", "teacher_layer", "region", "value", "n"}
_COLUMNS = {
    "score": "score",
    "standard_error": "±",
    "parameters": "parameters",
    "weight_bytes": "bytes",
    "tokens_per_second": "tokens/s",
}


def models_of(run: RunFiles) -> list[dict[str, Any]]:
    """The models of a distilled run, as result.json has them: `name`, `score`, `parameters`, ...; with the same student
    without a teacher, of the runs in the same folder."""
    distillation = run.result.get("distillation")
    models = distillation.get("models") if isinstance(distillation, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        return []
    student: dict[str, Any] = next((model for model in models if model.get("name") == "student"), {})
    alone = next(runs_alone(run), None)
    if alone is None:
        return models
    kept = {key: student.get(key) for key in ("parameters", "weight_bytes", "tokens_per_second")}
    return [*models, {**kept, "name": ALONE, "run": alone.run_dir.name, **_score(alone)}]


def _score(run: RunFiles) -> dict[str, Any]:
    return {"score": run.result.get("value"), "standard_error": run.result.get("standard_error")}


def runs_alone(run: RunFiles) -> Iterator[RunFiles]:
    """The finished runs beside this one that are the same but for the distillation."""
    wanted = _undistilled(run.run_dir)
    if wanted is None:
        return
    keys = ("command", "model", "task", "objective", "seed", "metric")
    for path in sorted(run.run_dir.resolve().parent.glob("*/result.json")):
        if path.parent == run.run_dir.resolve() or path.parent.is_symlink():  # runs/latest
            continue
        try:
            result = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            continue
        # The configuration of few runs is read: that takes long where there are many.
        if not isinstance(result, dict) or result.get("status") != "done" or "distillation" in result:
            continue
        if any(result.get(key) != run.result.get(key) for key in keys):
            continue
        if _undistilled(path.parent) == wanted:
            yield read_run(path.parent)


def _undistilled(folder: Path) -> dict[str, Any] | None:
    """The configuration of a run without what a distilled one has of its own; None where it cannot be read."""
    try:
        config = saved.read_yaml(folder / "config.yaml")
    except (OSError, UserError):
        return None
    if not isinstance(config, dict):
        return None
    return {key: value for key, value in config.items() if key not in _DIFFERING}


def distillation_html(run: RunFiles) -> str:
    """The table of the models, what else was measured of them, and how to train the student that is missing."""
    models = models_of(run)
    if not models:
        return ""
    metric = title(str(run.result.get("metric", "score")))
    columns = [key for key in _COLUMNS if any(model.get(key) is not None for model in models)]
    names = [metric if key == "score" else _COLUMNS[key] for key in columns]
    rows = [[model.get("name"), *(_cell(model.get(key)) for key in columns)] for model in models]
    parts = [html.table(["model", *names], rows), *_layer_map(run), *_agreement(run)]
    if not any(model["name"] == ALONE for model in models):
        words = ["--config", str(run.run_dir / "config.yaml"), "distill=none", f"name={run.name}-alone"]
        alone = command_line(str(run.result.get("command")), *words, modules=run.plugins)
        parts.append(html.paragraph("The same student without a teacher is not in this folder; it is trained by"))
        parts.append(html.commands([alone]))
    return "".join(parts)


def _cell(value: Any) -> Any:
    return round(value) if isinstance(value, float) and abs(value) > 1000 else value


def _layer_map(run: RunFiles) -> Iterator[str]:
    """What learned from what."""
    metadata = run.section("data").get("distillation")
    if isinstance(metadata, Mapping) and metadata.get("layers"):
        yield html.paragraph(f"Student layers and the teacher's that they learn from: {metadata['layers']}.")


def interchange_of(run: RunFiles) -> Mapping[str, Any]:
    """What was measured under interchange interventions; nothing where they were not made."""
    distillation = run.result.get("distillation")
    accuracy = distillation.get("interchange_accuracy") if isinstance(distillation, dict) else None
    cells = accuracy.get("cells") if isinstance(accuracy, dict) else None
    sound = isinstance(cells, list) and all(isinstance(cell, dict) and cell.keys() >= _CELL for cell in cells)
    return accuracy if sound and isinstance(accuracy, dict) else {}


def _agreement(run: RunFiles) -> Iterator[str]:
    """How far the student predicts what its teacher does, in a sentence each."""
    distillation: Mapping[str, Any] = run.result["distillation"]
    fidelity, accuracy = distillation.get("fidelity"), interchange_of(run)
    if isinstance(fidelity, dict) and _known(fidelity):
        yield html.paragraph(f"The student predicts what its teacher does of {_share(fidelity)}.")
    if _known(accuracy):
        changed = accuracy.get("changed")
        more = f"; where that changes what the teacher predicts, of {_share(changed)}" if _known(changed) else ""
        swapped = "With states of another text swapped into both models (interchange accuracy)"
        yield html.paragraph(f"{swapped}, of {_share(accuracy)}{more}.")
    elif distillation.get("interchange_accuracy_reason"):
        reason = plain(str(distillation["interchange_accuracy_reason"]), 300)
        yield html.paragraph(f"Agreement under interchange interventions was not measured: {reason}.")


def _known(share: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(share, dict) and isinstance(share.get("value"), float) and isinstance(share.get("n"), int)


def _share(share: Mapping[str, Any]) -> str:
    return f"{percent(share['value'])} of {count(share['n'])} targets"
