"""`data=task`: a task's texts as text to pretrain on (task-adaptive pretraining, Gururangan et al. 2020, section 4).

A row is a document, with one line per column. Repeated texts are dropped: the contexts of questions, the shared side of
pairs. Labels and test splits are not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmtool.data.sources import OnStage, held_out, in_parts, splits_of
from lmtool.errors import UserError
from lmtool.tasks.configs import TaskTextConfig
from lmtool.tasks.loading import unlabelled_rows


class TaskText:
    """Implements `data.sources.Source`. The development split is the validation text; without one, rows are held out.

    UserError as in `load_task`, and if there is too little text.
    """

    def __init__(
        self, config: TaskTextConfig, cache_dir: str | Path, progress: OnStage | None = None, offline: bool = False
    ):
        self._config = config
        texts: dict[str, list[str]] = {"train": [], "validation": []}
        for part in config.task.parts():
            for split, columns in unlabelled_rows(part, cache_dir, offline).items():
                texts["train" if split == "train" else "validation"] += _documents(columns)
        self._held_out = not texts["validation"]
        if len(texts["train"]) < 2:
            raise UserError(
                f"data.task={config.task.name}: {len(texts['train'])} rows with text; at least two are required",
                "use more rows with data.task.path=, or other text",
            )
        if self._held_out:
            sizes = np.array([len(text) for text in texts["train"]])
            out = held_out(sizes, config.validation_fraction)
            for split, taken in (("validation", out), ("train", ~out)):
                texts[split] = [texts["train"][row] for row in np.flatnonzero(taken)]
        self._texts = texts
        self.fingerprint = hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        for text in self._texts[splits_of(split)]:
            yield from in_parts(text)

    def count(self, split: str) -> int:
        return len(self._texts[splits_of(split)])

    def characters(self, split: str) -> int:
        return sum(map(len, self._texts[splits_of(split)]))

    def metadata(self) -> dict[str, object]:
        return {
            "source": f"texts of {', '.join(part.name for part in self._config.task.parts())}",
            "bytes": sum(len(text.encode()) for texts in self._texts.values() for text in texts),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": "row",
            "held_out": self._held_out,
            "fingerprint": self.fingerprint,
        }


def _documents(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as documents, each text at its first occurrence only."""
    seen: set[str] = set()
    for row in zip(*columns, strict=True):
        new = [text for text in dict.fromkeys(row) if text.strip() and text not in seen]
        seen.update(new)
        if new:
            yield "\n".join(new)
