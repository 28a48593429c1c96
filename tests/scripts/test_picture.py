"""README's picture: from any finished run, in both themes, with its numbers as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from lmtool.reporting.run_files import read_run


def test_the_picture_shows_the_run(tmp_path: Path, script: Callable[[str], ModuleType]) -> None:
    picture = script("picture")
    rows = [{"step": step, "split": "validation", "loss": 6 / step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "result.json").write_text(json.dumps({"metric": "loss", "seconds": 65.0}))
    (tmp_path / "facts.json").write_text(json.dumps({"baseline": {"name": "unigram", "metric": "loss", "value": 6.25}}))
    (tmp_path / "environment.json").write_text(json.dumps({"threads": 2, "device": "cpu"}))
    for inks in picture.THEMES.values():
        drawn = picture.picture(read_run(tmp_path), [("list", 0.5), ("name", 0.25)], inks)
        for text in ("word frequencies alone: 6.25", "the model: 2.00", "1 min 5 s on 2 CPU threads", "list", "50%"):
            assert text in drawn
        assert inks["paper"] in drawn
