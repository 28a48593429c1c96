"""The files and commands of docs/extend.md work, and the names in the pages of docs exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lmtool.cli import main as cli
from lmtool.config import registry
from lmtool.config.registry import Choice, build
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.learners.metrics import compute
from lmtool.learners.model import labels_of
from lmtool.tasks.loading import load_task
from lmtool.types import Packed
from tests.commands.conftest import write_text
from tests.objectives.objective_fixtures import backbone, store, tokenizer
from tests.test_plugins import lmtool

ROOT = Path(__file__).resolve().parents[1]
TOUR = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EXTEND = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python file=(\w+\.py)\n(.*?)```", EXTEND, flags=re.S))


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


ROWS = [("the cat sat near two mats", 2), ("the dog ran some way", 5)] * 20


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Imports the files of the page as modules."""
    folder = tmp_path_factory.mktemp("extend")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    for name in FILES:
        __import__(name.removesuffix(".py"))
    yield
    sys.path.remove(str(folder))
    names = {name.removesuffix(".py") for name in FILES}
    for table in registry._TABLES.values():  # so that other tests do not find these components
        for entry in [entry for entry in table.values() if entry.config.__module__ in names]:
            del table[entry.name], registry._ENTRIES[entry.config]


def learner_and_batch(folder: Path, kind: str, **more: object):
    """The learner of a task of this kind on ROWS, and a batch of four rows."""
    (folder / "rows.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS))
    section = {"kind": kind, "name": kind, "path": str(folder / "rows.csv"), **more}
    task = load_task(Choice("task", key="kind").validate(section), 0, folder, True)
    learner = task.config.learner(backbone(), tokenizer(), 0)
    examples = learner.examples(task.splits()["train"], 32)
    (batch,) = next(PackedLoader(examples, 0, batch_examples=4).steps()).batches
    return learner, batch


def test_focal_objective_downweights_confident_tokens() -> None:
    tokens, sums = tokenizer(), {}
    for gamma in (0.0, 2.0):
        config = Choice("objective").validate({"name": "focal_mlm", "gamma": gamma, "pairs": "none"})
        learner = config.learner(backbone(), tokens, 0).eval()
        examples = learner.examples(SplitData("train", store(tokens)), 32)
        batch = examples.batch(examples.plan(0).rows[:4], np.arange(4), 0)
        losses_M = learner.score(batch)["mlm"].losses
        wanted = (1 - (-losses_M).exp()) ** gamma * losses_M
        sums[gamma] = learner(batch, 1).sums["mlm"].detach()
        assert len(labels_of(batch, "mlm")) == len(losses_M)
        torch.testing.assert_close(sums[gamma], wanted.sum(), rtol=1e-5, atol=0)
    assert sums[2.0] < sums[0.0]


def packed(tokens_T: torch.Tensor, *lengths: int) -> Packed:
    return Packed(tokens_T, lengths)


def test_shifts_model_mixes_neighbors_within_a_text() -> None:
    config = Choice("model").validate({"name": "shifts", "num_layers": 2, "hidden_size": 16, "vocab_size": 64})
    model = build(config, 0).eval()
    tokens = torch.arange(8, 26)
    together = model(packed(tokens, 11, 7))
    apart = torch.cat([model(packed(tokens[:11], 11)), model(packed(tokens[11:], 7))])
    torch.testing.assert_close(together, apart)
    changed = model(packed(tokens.clone().index_fill_(0, torch.tensor([5]), 9), 11, 7))
    assert ((changed - together).abs().amax(1) > 0).nonzero().flatten().tolist() == [3, 4, 5, 6, 7]


def test_robust_task_loss_is_linear_beyond_delta(tmp_path: Path) -> None:
    learner, batch = learner_and_batch(tmp_path, "robust", delta=0.25)
    errors_N = (learner.eval().outputs(batch, 1)[:, 0] - learner.labels(batch)).abs()
    assert errors_N.min() > 0.25
    wanted = (0.25 * (errors_N - 0.125)).sum()
    torch.testing.assert_close(learner(batch, 1).sums["robust"], wanted)


def test_fast_head_tuning_and_balanced_accuracy(tmp_path: Path) -> None:
    learner, batch = learner_and_batch(tmp_path, "balanced")
    assert learner.metric.name == "balanced_accuracy"
    assert compute(("balanced_accuracy",), [0, 0, 0, 1], [0, 0, 1, 1]) == {"balanced_accuracy": pytest.approx(5 / 6)}
    learner.tune(build(Choice("tuning").validate({"name": "fast_head", "scale": 3.0})))
    head, biases = learner.parameter_groups()
    assert head.learning_rate_scale == 3.0 and biases.learning_rate_scale == 1.0
    assert all(name.endswith(".bias") for name, _ in biases.parameters) and biases.parameters
    assert torch.isfinite(learner.train()(batch, 1).sums["balanced"])


@pytest.mark.slow
def test_commands_of_the_extend_page_run(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_text(tmp_path / "text.txt")
    (tmp_path / "reviews.csv").write_text("review,stars\n" + "".join(f"{text},{label}\n" for text, label in ROWS))
    small = ["max_steps=2", "device=cpu", "tokenizer.vocab_size=300", "data=text", "data.path=text.txt"]
    first = ["pretrain", "experiment=bert_tiny", *small, "model.num_layers=1", "name=first"]
    lines = [shlex.join(first)]
    for command in commands(EXTEND):
        program, verb, *words = shlex.split(command)
        assert program == "lmtool"
        own = small if "pretrain" in (verb, words[0]) else small[:2]
        lines.append(shlex.join([verb, *(word for word in words if not word.startswith("max_")), *own]))
    for (status, out, err, _), line in zip(lmtool(tmp_path, *lines, path=None), lines, strict=True):
        assert status == 0, f"{line}\n{out[-2000:]}{err[-2000:]}"
    assert len(lines) == 7 and (tmp_path / "runs" / "balanced" / "result.json").is_file()


def test_commands_of_the_questions_page_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands are composed only; tests/test_readme.py runs similar ones."""
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line)[1:] for line in commands(QUESTIONS)]
    assert len(lines) == len(re.findall("^## ", QUESTIONS, flags=re.M))
    for words in lines:
        status = cli.main([*words, "--cfg", "job"])
        missing = re.findall(r"^error: (.*)$", capsys.readouterr().err, flags=re.M)
        assert status == 0 or all("runs" in line or "no checkpoint" in line for line in missing), (words, missing)


def test_hint_ignores_models_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "model=bert_tiny", "objective=clm", "--cfg", "job"]) == 2
    assert "hint: set model=gpt or objective=auto" in capsys.readouterr().err


def test_paths_and_names_in_pages_exist() -> None:
    for name in re.findall(r"`((?:tests|conf|scripts|docs)/[\w./]+)`", TOUR + EXTEND + QUESTIONS):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+/\w+\.py)`", TOUR):
        assert (ROOT / "lmtool" / name).exists(), name
    paths = [path for folder in ("lmtool", "scripts", "conf", "tests") for path in (ROOT / folder).rglob("*.*")]
    sources = (path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".yaml"))
    words = {word for source in sources for word in re.findall(r"\w+", source)} | {path.stem for path in paths}
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", TOUR)
    assert not {word for name in names for word in name.removesuffix(".py").split(".")} - words
