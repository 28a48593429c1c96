"""A task's data from the hub, through the `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.files import Table, canonical


def read_hub(config: TaskConfig, cache_dir: str | Path, offline: bool) -> dict[str, Table]:
    """Splits by canonical name. Classes come as their names, so that no order of labels is relied on.

    Raises UserError where the data set cannot be had, with the commands that do without.
    """
    import datasets  # seconds to import, and needed for hub data only

    name, _, subset = str(config.hub).partition(":")
    folder = Path(cache_dir).expanduser() / "hub"
    download = datasets.DownloadConfig(local_files_only=offline, max_retries=1)
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = was_offline or offline
    try:
        splits = datasets.load_dataset(name, subset or None, cache_dir=str(folder), download_config=download)
    except (OSError, ValueError, RuntimeError) as problem:
        # The library's own errors, those of requests and of huggingface_hub are all of these three kinds.
        reason = "offline=true" if offline else f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"
        raise UserError(
            f"task={config.name}: hub={config.hub} cannot be read ({reason})",
            f"lmtool finetune task={config.name} task.path=FOLDER checkpoint=RUN   (task.path: a folder with train and "
            "dev files, .tsv .csv or .jsonl; checkpoint: a run to start from, or none)",
        ) from problem
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
    return {canonical(split): _table(config, f"{config.hub} {split}", rows) for split, rows in splits.items()}


def _table(config: TaskConfig, origin: str, rows: Any) -> Table:
    columns = {name: list(rows[name]) for name in rows.column_names}
    for name, feature in rows.features.items():
        names = getattr(feature, "names", None)
        if names:
            columns[name] = [names[value] if value is not None and value >= 0 else "" for value in columns[name]]
    return Table(columns, [(origin, number) for number in range(len(rows))], tuple(columns))
