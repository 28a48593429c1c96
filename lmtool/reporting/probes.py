"""What `lmtool probe` prints and writes: accuracy by layer, beside random weights and the commonest class, as a table,
a picture and a page of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.reporting import html
from lmtool.reporting.console import Output
from lmtool.reporting.report import write_page
from lmtool.reporting.table import print_table
from lmtool.runs.files import replace_text, to_json
from lmtool.secrets import masked_data

_HEADER = ["layer", "trained", "random weights"]


def print_probes(output: Output, target: str, probes: Mapping[str, Any]) -> None:
    """The table of one checkpoint. probes: its entry in probe.json."""
    print_table(output, _HEADER, _rows(probes), heading=_heading(target, probes))


def _rows(probes: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [str(row["layer"] or "0 (embedding)"), _score(row["trained"]), _score(row["random"])]
        for row in probes["layers"]
    ]
    return [*rows, ["majority", _score(probes["majority"]), ""]]


def _heading(target: str, probes: Mapping[str, Any]) -> str:
    return (
        f"{probes['checkpoint']} · {target} · accuracy ± standard error · n = {probes['n']:,}, "
        f"{probes['classes']:,} classes, learned from {probes['examples']:,}"
    )


def _score(score: Mapping[str, float]) -> str:
    return f"{score['accuracy']:.4f} ± {score['standard_error']:.4f}"


def write_probes(folder: Path, details: Mapping[str, Any]) -> None:
    """probe.json, probe.png and probe.html in a folder. UserError where the disk refuses."""
    # matplotlib takes most of a second to import.
    from lmtool.reporting import drawing, plots

    figure = plots.layers_figure(details["target"], details["checkpoints"])
    tables = [
        html.paragraph(_heading(details["target"], probes)) + html.table(_HEADER, _rows(probes))
        for probes in details["checkpoints"]
    ]
    body = [f"<h1>{html.escape(details['target'])}</h1>", html.figure(drawing.svg(figure)), *tables]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "probe.json", to_json(masked_data(dict(details))) + "\n")
        drawing.write_png(figure, folder / "probe.png")
        write_page(folder / "probe.html", html.page("probes · lmtool", body))
    except OSError as error:
        raise UserError(f"output={folder}: {error.strerror}", "give another output=") from error
