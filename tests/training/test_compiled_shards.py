"""Compiled layers with sharded parameters give the losses of one uncompiled process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from lmtool.training import compiling, loop
from lmtool.training.group import ALONE, ProcessGroup

from .ranks import started
from .test_sharded import run_on


def run_compiled(group: ProcessGroup, *arguments: Any, **changes: Any) -> Any:
    """The run and its number of graphs; recompilation after the first step fails."""
    gradients = loop.gradients

    def warmed_up(engine: Any, data: Any, step: int, *rest: Any) -> Any:
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            return gradients(engine, data, step, *rest)

    with (
        patch.object(loop, "gradients", warmed_up),
        patch.object(loop, "compiled", lambda on: compiling.compiled(True, "aot_eager")),
    ):
        return run_on(group, *arguments, **changes)[0], counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["mlm", "clm", "span_corruption"])
def test_compiled_sharded_losses_match_single_process(name: str, recomputes: bool, tmp_path: Path) -> None:
    alone, _ = run_on(ALONE, str(tmp_path / "alone"), name, "ddp", max_steps=6)
    with started(2) as two:
        run = partial(run_compiled, max_steps=6, gradient_checkpointing=recomputes)
        for steps, graphs in two.run(run, str(tmp_path / "two"), name, "fsdp"):
            assert 0 < graphs < 8
            np.testing.assert_allclose(steps, alone, rtol=1e-5)
