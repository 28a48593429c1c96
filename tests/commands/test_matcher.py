"""Incompatible sections are reported all at once, each with its key and an override that fixes it."""

from __future__ import annotations

import pytest

from lmtool.cli import main as cli
from lmtool.config.registry import entries
from lmtool.learners.configs import LearnedConfig
from lmtool.models.configs import ModelConfig
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.texts import TokenClassificationConfig
from lmtool.weights.folders import families

FINETUNE = ("finetune", "checkpoint=none", "task.path=rows")
MIXTURE = ("task=mixture", "task.members=[{kind: classification, name: films, path: rows, pooling: first},sst2]")


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (
            ("finetune", "checkpoint=none", "model=gpt_tiny", *MIXTURE, "task.with.sst2.path=rows"),
            [
                "task.members: task.with.films.pooling=first: the first token of a decoder such as model=gpt",
                "set task.with.films.pooling=last or task.with.films.pooling=mean",
            ],
        ),
        (
            ("pretrain", "model=roberta_tiny", "objective=mlm_nsp"),
            ["error: objective.pairs=nsp needs a model with segment embeddings", "set objective.pairs=none"],
        ),
        (
            (*FINETUNE, "model=albert_tiny", "task=sst2", "tuning=last_n", "task.head=text_to_text", "parallel=fsdp"),
            [
                "model=albert does not generate text: it is an encoder",
                "model=albert has one layer, applied at every depth",
                "parallel=fsdp needs the same forwards in all processes",
            ],
        ),
    ],
)
def test_all_incompatible_sections_are_reported(typed, messages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*typed]) == 2
    shown = capsys.readouterr().err
    assert all(message in shown for message in messages), shown


def test_published_model_types_are_unique():
    types = [kind for entry in entries("model") if (kind := vars(entry.config).get("hf_model_type")) is not None]
    assert len(types) == len(set(types)) == len(families()) and families()["llama"] == "llama"
    assert all(issubclass(entry.config, ModelConfig) for entry in entries("model"))
    assert all(issubclass(entry.config, LearnedConfig) for group in ("task", "objective") for entry in entries(group))


def test_class_names_exist_only_for_kinds_with_classes():
    assert ClassificationConfig(labels=("no", "yes")).class_names == ("no", "yes")
    assert TokenClassificationConfig().class_names is None and TokenClassificationConfig.has_classes
