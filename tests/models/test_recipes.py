"""Recipes of conf/recipe/: they decode, learning rates depend on the width, and plugins may have recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import Field

from lmtool.cli import main as cli
from lmtool.config import groups, registry, saved
from lmtool.errors import UserError
from lmtool.models import recipes
from lmtool.models.configs import BertConfig, ModelConfig
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.verbs import command_classes

FAMILIES = {
    entry.name: entry.config for entry in registry.entries("model") if entry.config.__module__.startswith("lmtool.")
}
SHIPPED = groups.conf_dir() / "recipe"


def configured(*words: str) -> Any:
    arguments = cli.parse(words)
    return cli.configuration(arguments.rest.pop(0), arguments, running=False)


def test_recipes_match_the_families() -> None:
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == {*FAMILIES, "default"}


@pytest.mark.parametrize("name", FAMILIES)
def test_recipe_sections_decode_at_every_width(name: str) -> None:
    widths = recipes.read(SHIPPED / f"{name}.yaml").widths
    for width in (FAMILIES[name].model_fields["hidden_size"].default, *widths):
        recipe = recipes.recipe_of(FAMILIES[name], width)
        sections = {"tokenizer": recipe["tokenizer"]} | recipe["pretrain"]
        assert sections.keys() == {"tokenizer", "objective", "optimizer", "schedule"}
        assert recipe["finetune"].keys() == {"optimizer", "schedule"}
        for group, section in [*sections.items(), *recipe["finetune"].items()]:
            registry.Choice(group).validate(section)


@pytest.mark.parametrize(
    ("verb", "typed", "rates"),
    [
        ("pretrain", (), {"bert": 1e-4, "bert_tiny": 1e-3, "bert_mini": 3e-4, "bert_large": 1e-4, "gpt_medium": 3e-4}),
        ("finetune", ("task=pydocs",), {"bert_tiny": 1e-3, "bert_mini": 1.5e-4, "bert": 5e-5, "bert_large": 5e-5}),
    ],
)
def test_learning_rate_depends_on_the_width(verb: str, typed: tuple[str, ...], rates: dict[str, float]) -> None:
    assert {name: configured(verb, f"model={name}", *typed).optimizer.lr for name in rates} == rates


def test_generator_size_depends_on_the_width() -> None:
    assert configured("pretrain", "model=electra").objective.generator_size == 1 / 3
    assert configured("pretrain", "model=electra_small").objective.generator_size == 0.25


def test_electra_finetuning_matches_the_paper() -> None:
    """Clark et al. 2020, table 7."""
    expected = {"electra_small": (3e-4, 0.8), "electra": (1e-4, 0.8), "electra_large": (5e-5, 0.9)}
    for name, (rate, decay) in expected.items():
        optimizer = configured("finetune", f"model={name}", "task=pydocs").optimizer
        assert (optimizer.lr, optimizer.layer_decay, optimizer.weight_decay) == (rate, decay, 0.0)


def test_parameter_scaled_optimizers_keep_their_learning_rate() -> None:
    for section in ({"name": "adafactor", "lr": 1e-2}, {"name": "adamw", "lr": 2e-2, "scale_parameter": True}):
        assert recipes.scale_rate(section, 128, 768) == section
    assert recipes.scale_rate({"name": "adamw"}, 128, 768) == {"name": "adamw"}
    assert recipes.scale_rate({"name": "adamw", "lr": 1e-4}, 384, 768) == {"name": "adamw", "lr": 2e-4}


def test_typed_values_override_the_recipe() -> None:
    config = configured("pretrain", "model=roberta", "optimizer.clip_norm=2.0", "schedule.final_fraction=0.5")
    assert (config.optimizer.lr, config.optimizer.clip_norm) == (6e-4, 2.0)
    assert (config.schedule.warmup_fraction, config.schedule.final_fraction) == (0.048, 0.5)


@pytest.fixture
def plugin_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe folder of a third-party module."""
    module = ModuleType("plugin_recipes")
    module.__file__ = str(tmp_path / "plugin_recipes.py")
    monkeypatch.setitem(sys.modules, "plugin_recipes", module)
    (tmp_path / "recipe").mkdir()
    return tmp_path / "recipe"


def family(base: type[ModelConfig], family_name: str) -> type[ModelConfig]:
    class Family(base):  # type: ignore[misc, valid-type]
        __module__ = "plugin_recipes"
        name: str = Field(family_name, description="Third-party.")

    return Family


def test_plugin_recipe_extends_the_family_and_the_default(plugin_recipes: Path) -> None:
    (plugin_recipes / "odd.yaml").write_text(
        "pretrain: {optimizer: {name: lamb}}\nwidths: {64: {pretrain: {optimizer: {lr: 0.5}}}}"
    )
    odd, plain = family(BertConfig, "odd"), family(ModelConfig, "plain")
    bert = BertConfig().recipe()
    assert odd().recipe() == {**bert, "pretrain": {**bert["pretrain"], "optimizer": {"name": "lamb"}}}
    assert odd(hidden_size=64, num_heads=4).recipe()["pretrain"]["optimizer"] == {"name": "lamb", "lr": 0.5}
    default = recipes.read(SHIPPED / "default.yaml")
    assert plain().recipe()["pretrain"] == {"optimizer": default.pretrain.optimizer, "schedule": {"name": "linear"}}
    assert plain().recipe()["finetune"]["schedule"] == default.finetune.schedule and not plain().recipe()["tokenizer"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("pretrain: {optimiser: {name: adamw}}", "pretrain.optimiser: Extra inputs are not permitted"),
        ("widths: {64: {tokenizer: {name: bpe}}}", "widths.64.tokenizer changes tokenizer, which the recipe lacks"),
        ("finetune: {schedule: linear}", "finetune.schedule: Input should be a valid dictionary"),
        ("pretrain: {", "odd.yaml:2:"),
    ],
)
def test_invalid_recipe_is_refused_with_the_key(plugin_recipes: Path, content: str, problem: str) -> None:
    (plugin_recipes / "odd.yaml").write_text(content)
    with pytest.raises(UserError) as caught:
        family(ModelConfig, "odd")().recipe()
    assert problem in caught.value.message and str(plugin_recipes / "odd.yaml") in caught.value.message


def test_saved_config_decodes_without_recipe_files(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("pretrain", "model=bert_tiny")
    data = saved.body(saved.save(config, "pretrain"))
    monkeypatch.setattr(recipes, "read", lambda path: pytest.fail(f"{path} is read"))
    assert decode_config("pretrain", data) == config and type(config) is command_classes()["pretrain"]


def test_show_prints_the_recipe_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "model=bert_tiny"]) == 0
    shown = capsys.readouterr().out
    for path in ("model/bert_tiny", "recipe/bert", "recipe/default"):
        assert f"# conf/{path}.yaml\n" in shown
        assert (groups.conf_dir() / f"{path}.yaml").read_text() in shown
    assert "10,000 of 1,000,000 steps" in shown


@pytest.mark.parametrize("name", groups.options("experiment"))
def test_experiments_do_not_repeat_the_recipe(name: str) -> None:
    written = yaml.safe_load((groups.conf_dir() / "experiment" / f"{name}.yaml").read_text())
    chosen = {key.removeprefix("override /"): value for item in written["defaults"] for key, value in item.items()}
    prescribed = configured("pretrain", f"model={chosen['model']}").model.recipe()["pretrain"]
    for section in {"optimizer", "schedule"} - chosen.keys():
        own, known = written.get(section, {}), prescribed[section]
        assert not [key for key, value in own.items() if key in known and known[key] == value]
