"""One page for several runs: their curves over each other, what differs in their configurations, their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lmtool.config import yaml_files
from lmtool.errors import UserError
from lmtool.reporting import html
from lmtool.reporting.report import write_page, writing
from lmtool.reporting.run_files import RunFiles, read_run
from lmtool.reporting.text import lower_is_better, title

# Keys that differ between any two runs and say nothing.
_NAMES = ("name", "run_dir")


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """{'optimizer': {'lr': 1}} -> {'optimizer.lr': 1}."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    return {
        key: leaf for name, value in values.items() for key, leaf in flat(value, f"{prefix}.{name}".strip(".")).items()
    }


def _configuration(run: RunFiles) -> dict[str, Any]:
    try:
        return flat(yaml_files.load(run.config) or {})
    except yaml.YAMLError as failure:
        run.problems.append(f"config.yaml is not valid YAML ({str(failure).splitlines()[0]}).")
        return {}


def differing_keys(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys whose values are not the same in all configurations, in the order of the first."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    absent = object()
    return [
        key
        for key in keys
        if key not in _NAMES and len({repr(configuration.get(key, absent)) for configuration in configurations}) > 1
    ]


def write_comparison(run_dirs: Sequence[str | Path], output: str | Path) -> Path:
    """Write a page that sets runs beside each other; its path. UserError where a folder is no run."""
    if len(run_dirs) < 2:
        raise UserError(f"a comparison needs two runs or more, {len(run_dirs)} given", "name the folders of two runs")
    from lmtool.reporting import drawing, plots

    runs = [read_run(run_dir) for run_dir in run_dirs]
    metrics = list(dict.fromkeys(str(run.result["metric"]) for run in runs if run.result.get("metric")))
    shown = [("validation", metric) for metric in metrics]
    shown += [("validation", "loss"), ("train", "loss"), ("train", "learning_rate")]
    figures = [plots.overlay_figure(runs, metric, split) for split, metric in dict.fromkeys(shown)]
    configurations = [_configuration(run) for run in runs]
    keys = differing_keys(configurations)
    body = [
        f"<h1>{len(runs)} runs beside each other</h1>",
        html.section("Scores", _scores(runs, metrics)),
        html.section("What differs", _differences(runs, configurations, keys)),
        html.section("Curves", *(html.figure(drawing.svg(figure)) for figure in figures if figure is not None)),
        html.section(
            "Left out", *(html.paragraph(f"{run.name}: {problem}") for run in runs for problem in run.problems[:5])
        ),
    ]
    path = Path(output)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(path, html.page(f"{len(runs)} runs · lmtool", [part for part in body if part]))
    return path


def _scores(runs: Sequence[RunFiles], metrics: Sequence[str]) -> str:
    def order(run: RunFiles) -> tuple[bool, str, float]:
        value, metric = run.result.get("value"), str(run.result.get("metric"))
        if not isinstance(value, (int, float)):
            return True, metric, 0.0
        return False, metric, value if lower_is_better(metric) else -value

    rows = [
        [
            run.name,
            *(run.result.get("value") if run.result.get("metric") == metric else None for metric in metrics),
            run.baseline.get("value"),
            *(run.result.get(key) for key in ("steps", "tokens", "seconds")),
            _rounded(run.result.get("tokens_per_second")),
            title(str(run.result.get("status", ""))),
        ]
        for run in sorted(runs, key=order)
    ]
    return html.table(
        ["run", *map(title, metrics), "baseline", "steps", "tokens", "seconds", "tokens/s", "status"], rows
    )


def _rounded(value: Any) -> int | None:
    return round(value) if isinstance(value, (int, float)) else None


def _differences(runs: Sequence[RunFiles], configurations: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    if not keys:
        return html.paragraph("The configurations are equal.")
    rows = [[key, *(_value(configuration.get(key)) for configuration in configurations)] for key in keys[:100]]
    return html.table(["key", *(run.name for run in runs)], rows)


def _value(value: Any) -> str | None:
    return None if value is None else str(value)
