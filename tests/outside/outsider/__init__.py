"""A package that is not part of lmtool: a model, an objective, a task and a tuning method of its own."""

from __future__ import annotations

from outsider import configs as configs
