"""What `lmtool probe` prints and writes: accuracy by layer, beside random weights and the commonest class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.runs.files import replace_text, to_json
from lmtool.secrets import masked_data


def print_probes(output: Output, target: str, probes: Mapping[str, Any]) -> None:
    """The table of one checkpoint. probes: its entry in probe.json."""
    rows = [
        [row["layer"] or "0 (embedding)", _score(row["trained"]), _score(row["random"])] for row in probes["layers"]
    ]
    rows.append(["majority", _score(probes["majority"]), ""])
    heading = (
        f"{probes['checkpoint']} · {target} · accuracy ± standard error · n = {probes['n']:,}, "
        f"{probes['classes']:,} classes, learned from {probes['examples']:,}"
    )
    print_table(output, ["layer", "trained", "random weights"], rows, heading=heading)


def _score(score: Mapping[str, float]) -> str:
    return f"{score['accuracy']:.4f} ± {score['standard_error']:.4f}"


def write_probes(folder: Path, details: Mapping[str, Any]) -> None:
    """probe.json and probe.png in a folder. UserError where the disk refuses."""
    # matplotlib takes most of a second to import.
    from lmtool.reporting import drawing, plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "probe.json", to_json(masked_data(dict(details))) + "\n")
        drawing.write_png(plots.layers_figure(details["target"], details["checkpoints"]), folder / "probe.png")
    except OSError as error:
        raise UserError(f"output={folder}: {error.strerror}", "give another output=") from error
