"""A package that is not part of lmtool: models, objectives, tasks and tuning methods of a plugin."""

from __future__ import annotations

from outsider import configs as configs
