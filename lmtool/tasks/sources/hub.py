"""A task's data from the hub, through the `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtool.data.hub import hub_access
from lmtool.data.parquet import named
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.sources.files import TaskTable, canonical


def read_hub(config: TaskConfig, cache_dir: str | Path, offline: bool) -> dict[str, TaskTable]:
    """Splits by canonical name. Classes come as their names, so that no order of labels is relied on.

    Raises UserError where the data set cannot be had, with the commands that do without.
    """
    without = (
        f"lmtool finetune task={config.name} task.path=FOLDER checkpoint=RUN   (task.path: a folder with train and "
        "dev files, .tsv .csv or .jsonl; checkpoint: a run to start from, or none)"
    )
    name, _, subset = str(config.hub).partition(":")
    with hub_access(f"task={config.name}: task.hub={config.hub}", name, offline, without) as datasets:
        splits = datasets.load_dataset(name, subset or None, cache_dir=str(Path(cache_dir).expanduser() / "hub"))
    return {canonical(split): _table(config, f"{config.hub} {split}", rows) for split, rows in splits.items()}


def _table(config: TaskConfig, origin: str, rows: Any) -> TaskTable:
    columns = {name: list(rows[name]) for name in rows.column_names}
    for name, feature in rows.features.items():
        names = getattr(getattr(feature, "feature", feature), "names", None)  # of a class, or of a list of classes
        if names:
            columns[name] = [named(value, names) for value in columns[name]]
    return TaskTable(_flat(columns), [(origin, number) for number in range(len(rows))], tuple(columns))


def _flat(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """With a column for each key of a column of objects, NAME.KEY (`translation.de`)."""
    flat = dict(columns)
    for name, values in columns.items():
        if values and all(isinstance(value, dict) for value in values):
            flat |= {f"{name}.{key}": [value.get(key) for value in values] for key in values[0]}
    return flat
