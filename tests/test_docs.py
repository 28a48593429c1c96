"""The samples of docs/architecture.md run: each component is added, chosen by its name and takes a step."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from lmtool.config.tables import Choice, build, entry_of
from lmtool.data.loader import PackedLoader
from lmtool.data.split import SplitData
from lmtool.errors import UserError
from lmtool.tasks.loading import load_task
from tests.objectives.objective_fixtures import backbone, store, tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def tour() -> types.ModuleType:
    """The page's samples as the module `tour`."""
    module = types.ModuleType("tour")
    sys.modules["tour"] = module
    for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(sample, "docs/architecture.md", "exec"), module.__dict__)
    return module


def test_a_tuning_method_and_a_task_kind(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("text\tlabel\n" + "".join(f"the cat sat near {word}\t{word}\n" for word in ("two", "some") * 20))
    section = {"kind": "strict", "name": "strict", "path": str(file)}
    task = load_task(Choice("task", key="kind").validate(section), 0, tmp_path, True)
    learner = task.config.learner(backbone(), tokenizer(), 0)
    learner.tune(build(Choice("tuning").validate({"name": "fast_biases", "scale": 3.0})))
    head, biases = learner.parameter_groups()
    assert head.learning_rate_scale == 1.0 and biases.learning_rate_scale == 3.0
    assert all(name.endswith(".bias") for name, _ in biases.parameters) and biases.parameters
    examples = learner.examples(task.splits()["train"], 32)
    (batch,) = next(PackedLoader(examples, 0, batch_examples=4).steps()).batches
    assert torch.isfinite(learner.train()(batch, 1).sums["strict"])
    file.write_text(file.read_text() + "\ttwo\n")
    with pytest.raises(UserError, match="rows.tsv:42: an empty text"):
        load_task(Choice("task", key="kind").validate(section), 0, tmp_path, True)


def test_an_objective() -> None:
    config = Choice("objective").validate({"name": "calm_clm", "calm": 0.5})
    assert entry_of(config).builder == "tour:CalmLanguageModel"
    tokens = tokenizer("bytebpe")
    learner = config.learner(backbone("gpt"), tokens, 0).train()
    examples = learner.examples(SplitData("train", store(tokens)), 32)
    plan = examples.plan(0)
    output = learner(examples.batch(plan.rows[:4], np.arange(4), 0), 1)
    assert output.weights == {"clm": 1.0, "calm": 0.5} and all(torch.isfinite(total) for total in output.sums.values())


def test_what_the_page_points_to_is_there() -> None:
    for name in re.findall(r"`((?:tests|conf|scripts|docs)/[\w./]+)`", PAGE):
        assert (ROOT / name).exists(), name
    packages = {path.name for path in (ROOT / "lmtool").iterdir() if (path / "__init__.py").is_file()}
    assert packages <= set(re.findall(r"\b(\w+)/", PAGE)), "every package has its place on the picture"
    for name in re.findall(r"`(\w+/\w+\.py)`", PAGE):
        assert (ROOT / "lmtool" / name).exists(), name
