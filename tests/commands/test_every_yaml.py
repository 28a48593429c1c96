"""Every shipped objective, model, optimizer, tokenizer, tuning method and experiment runs two steps at tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import TINY, finetune, pretrain, tiny

CONF = Path(__file__).resolve().parents[2] / "conf"
TWO = ["max_steps=2", "evaluate_every=2"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(place: Path, cache: Path) -> Path:
    """The working folder, with a cache that all tests share."""
    (place / "cache").symlink_to(cache)
    return place


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "auto")


def steps(folder: Path) -> int:
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "done" and result["value"] is not None
    return result["steps"]


@pytest.mark.parametrize(
    "objective",
    slow_but(
        [name for name in names("objective") if not name.startswith(("denoising_", "rtd_", "mlm_nsp_"))],
        names("objective"),
    ),
)
def test_every_objective_runs(place: Path, objective: str) -> None:
    partners = {
        "clm": "gpt_tiny", "prefix_lm": "gpt_tiny", "span_corruption": "t5_tiny", "denoising": "bart_tiny",
        "skip_gram": "word_vectors_tiny", "bilm": "elmo_tiny", "plm": "xlnet_tiny", "mntp": "gpt_tiny",
        "sequence_autoencoder": "lstm_tiny", "glove": "word_vectors_tiny",
    }  # fmt: skip
    model = next((partner for start, partner in partners.items() if objective.startswith(start)), "bert_tiny")
    more = ["objective.task={kind: classification, path: rows, text: [sentence]}"] if objective == "task" else []
    more += ["tokenizer.special_tokens=roberta"] if objective.startswith("mntp") else []
    assert steps(pretrain("run", f"objective={objective}", *more, *TWO, model=model)) == 2


@pytest.mark.parametrize(
    ("model", "members"),
    [("bert_tiny", "[{name: rtd, generator_size: 0.5},mlm]"), ("t5_tiny", "[span_corruption,prefix_lm,denoising]")],
)
def test_objective_mixtures_run(place: Path, model: str, members: str) -> None:
    words = ["objective=mixture", f"objective.members={members}", *TWO]
    assert steps(pretrain("run", *words, model=model)) == 2


def changes_only_sizes(model: str) -> bool:
    """Whether a preset only changes the sizes of another one; at TINY's sizes both run alike."""
    keys = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text())
    return "name" not in keys


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * changes_only_sizes(name)) for name in names("model")]
)
def test_every_model_preset_runs(place: Path, model: str) -> None:
    """Every preset is its family's class with other numbers, so all run at the family's tiny size."""
    grouped = ["model.num_key_value_heads=1"] if model.startswith(("llama", "smollm", "qwen")) else []
    assert steps(pretrain("run", *TWO, *grouped, model=model)) == 2


@pytest.mark.parametrize("model", slow_but({"bert_tiny"}, ["bert_tiny", "gpt_tiny"]))
@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith("rotary_"))
        for name in names("model/positions")
        if not name.startswith("tree_")  # text to pretrain on has no trees: see tests/tasks/test_trees.py
    ],
)
def test_every_position_kind_runs(place: Path, positions: str, model: str) -> None:
    assert steps(pretrain("run", f"model/positions={positions}", *TWO, model=model)) == 2


CHOICES = [f"{group}={name}" for group in ("optimizer", "schedule") for name in names(group)]


@pytest.mark.parametrize("choice", slow_but([choice for choice in CHOICES if choice.startswith("schedule=")], CHOICES))
def test_every_optimizer_and_schedule_runs(place: Path, choice: str) -> None:
    assert steps(pretrain("run", choice, "schedule.warmup_fraction=0.5", "max_steps=6", "evaluate_every=2")) == 6


@pytest.mark.parametrize("tokenizer", [name for name in names("tokenizer") if name != "folder"])
def test_every_tokenizer_runs(place: Path, tokenizer: str) -> None:
    model = {"bpe": "gpt_tiny", "bytebpe": "gpt_tiny", "spelled": "elmo_tiny"}.get(tokenizer, "bert_tiny")
    more = ["tokenizer.special_tokens=albert"] if tokenizer == "sentencepiece" else []  # BERT's format needs [CLS]
    assert steps(pretrain("run", f"tokenizer={tokenizer}", *more, *TWO, model=model)) == 2


@pytest.mark.parametrize("tuning", names("tuning"))
def test_every_tuning_method_runs(place: Path, tuning: str) -> None:
    sizes = [word for word in TINY if word.startswith("model.")]
    words = ["checkpoint=none", "model=bert_tiny", *sizes, *TWO]
    more = []
    if tuning == "adapter_fusion":
        runs = [str(finetune(name, *words, "tuning=adapter")) for name in ("first", "second")]
        more = [f"tuning.adapters=[{','.join(runs)}]"]
    assert steps(finetune("run", f"tuning={tuning}", *words, *more)) == 2


@pytest.mark.parametrize(
    "experiment", slow_but(["bert_tiny", "gpt_tiny", "t5_tiny", "word_vectors_tiny"], names("experiment"))
)
def test_every_experiment_runs(place: Path, experiment: str) -> None:
    """Each experiment runs two steps on small text."""
    written = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    model = next(choice["override /model"] for choice in written["defaults"] if "override /model" in choice)
    memory = ["model.memory_length=16", "objective.reuse=16", "model.max_positions=64"]
    words = [
        "pretrain",
        f"experiment={experiment}",
        *tiny(model),
        *(memory if "memory_length" in written.get("model", {}) else []),
        *(["phases=[]"] if "phases" in written else []),  # some phases would be shorter than a step
        "data.packages=[json,email]",
        "data.validation_fraction=0.1",
    ]
    budget = [*TWO, "max_minutes=null", "batch_tokens=256", "batch_examples=null", "cache_dir=cache"]
    assert cli.main([*words, *budget, "name=run"]) == 0
    assert steps(Path("runs/run")) == 2
