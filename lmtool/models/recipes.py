"""What a family's paper prescribes, and so what `auto` stands for in a run of it: `conf/recipe/FAMILY.yaml`.

A plugin's recipe stands in the folder `recipe/` beside the module of its model's class. A section that a family has no
recipe for is that of the class it derives from, else that of `conf/recipe/default.yaml`. Imports no torch.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from lmtool.config import groups, saved
from lmtool.config.auto import merge
from lmtool.config.base import Config
from lmtool.errors import UserError

Section = dict[str, Any]

GROUP = "recipe"
ABSOLUTE_STEPS = ("adam", "adamw", "muon")
"""Optimizers whose step does not depend on the size of what it changes: their learning rate goes with the width."""
LARGEST_FITTED = 1e-3
"""The largest rate that fitting to the width gives: published rates are for large batches. Measured on small ones, 700
steps of 2,048 tokens: bert_tiny ends at 6.61 with 6e-4, 6.49 with 1e-3, 6.86 with 2e-3; gpt_tiny has after 300 of them
5.56 with 1e-3 and 5.85 with 3.6e-3."""


class FinetuningRecipe(Config):
    """How the weights move."""

    optimizer: Section = Field({}, description="What optimizer=auto stands for.")
    schedule: Section = Field({}, description="What schedule=auto stands for.")


class PretrainingRecipe(FinetuningRecipe):
    """What is learned, and how the weights move."""

    objective: Section = Field({}, description="What objective=auto stands for.")


class Sections(Config):
    """What `auto` stands for in each command; a section that is empty is taken from elsewhere."""

    tokenizer: Section = Field({}, description="What tokenizer=auto stands for, in both commands.")
    pretrain: PretrainingRecipe = Field(PretrainingRecipe(), description="The sections of lmtool pretrain.")
    finetune: FinetuningRecipe = Field(FinetuningRecipe(), description="The sections of lmtool finetune.")

    def by_key(self) -> dict[str, Section]:
        """The sections that are there, as `pretrain.optimizer`."""
        commands = {"pretrain": self.pretrain, "finetune": self.finetune}
        nested = {f"{command}.{key}": section for command, sections in commands.items() for key, section in sections}
        return {key: section for key, section in ({"tokenizer": self.tokenizer} | nested).items() if section}


class Recipe(Sections):
    """One YAML of the group. Its learning rates are for the width that is the default of the family's class."""

    widths: dict[int, Sections] = Field(
        {}, description="Values that a width has instead, published or measured, by model.hidden_size."
    )

    @model_validator(mode="after")
    def _widths_change_what_is_there(self) -> Recipe:
        for width, sections in self.widths.items():
            for key in sections.by_key().keys() - self.by_key().keys():
                raise ValueError(f"widths.{width}.{key} changes {key}, which the recipe lacks")
        return self

    def at(self, width: int, published_width: int) -> dict[str, Section]:
        """Its sections by key, at a width. An optimizer's learning rate that is not known there is fitted to it."""
        sections, known = self.by_key(), self.widths.get(width, Sections()).by_key()
        fitted = {key: fit(section, width, published_width) for key, section in sections.items()}
        return {key: merge(section, known.get(key, {})) for key, section in fitted.items()}


def fit(section: Section, width: int, published_width: int) -> Section:
    """An optimizer section with its learning rate fitted to a width; every other section as it is.

    A narrower model than the section is for gets a larger rate, in inverse proportion to the width (Yang et al. 2022,
    "Tensor Programs V", for Adam; the published tables of GPT-3, RoBERTa and ELECTRA stay within a factor of 1.5 of
    it), `LARGEST_FITTED` at most. A wider one keeps the rate. In finetuning from BERT's 5e-5, widths 256 to 512 get
    1.5e-4 to 7.5e-5, within the rates Google lists for its compact BERTs (3e-4, 1e-4, 5e-5, 3e-5; Turc et al. 2019).
    """
    rate = section.get("lr")
    if rate is None or section.get("name") not in ABSOLUTE_STEPS or section.get("scale_parameter"):
        return section
    narrower = max(rate, min(rate * published_width / width, LARGEST_FITTED))
    return {**section, "lr": float(f"{narrower:.3g}")}


def recipe_of(family: type[Config], width: int) -> dict[str, Any]:
    """The sections that `auto` stands for in a run of a family at a width: {"tokenizer": ..., "pretrain": {"objective":
    ..., ...}, "finetune": {...}}. Raises UserError where a recipe is not one."""
    sections = read(_default()).at(width, _published_width(family))
    for parent, path in _layers(family):
        sections |= read(path).at(width, _published_width(parent))
    nested: dict[str, Any] = {"tokenizer": sections.pop("tokenizer", {}), "pretrain": {}, "finetune": {}}
    for key, section in sections.items():
        command, _, name = key.partition(".")
        nested[command][name] = section
    return nested


def of_tuning(method: type[Config], name: str) -> dict[str, Section]:
    """The sections `optimizer` and `schedule` that a tuning method has a recipe for, `tuning/NAME.yaml` beside those of
    the families: the same at every width. Raises UserError where it is none."""
    path = tuning_file(method, name)
    return {} if path is None else {key: section for key, section in read(path).finetune if section}


def tuning_file(method: type[Config], name: str) -> Path | None:
    """The recipe of this name of a tuning method, where there is one."""
    path = _folder(method) / "tuning" / f"{name}.yaml"
    return path if path.is_file() else None


def files_of(family: type[Config]) -> list[Path]:
    """The recipes of a family, those that count first: its own, those of the classes it derives from, the default."""
    return [*(path for _, path in reversed(_layers(family))), _default()]


def _layers(family: type[Config]) -> list[tuple[type[Config], Path]]:
    """A family's class and those it derives from, as far as they have a recipe; its own last."""
    layers = []
    for parent in reversed(family.__mro__):
        field = parent.model_fields.get("name") if issubclass(parent, Config) else None
        if field is not None and isinstance(field.default, str):
            path = _folder(parent) / f"{field.default}.yaml"
            layers += [(parent, path)] if path.is_file() else []
    return layers


def _folder(family: type[Config]) -> Path:
    """Where the recipe of a class stands."""
    package, own = (name.partition(".")[0] for name in (family.__module__, __name__))
    file = sys.modules[family.__module__].__file__
    return groups.conf_dir() / GROUP if package == own or file is None else Path(file).parent / GROUP


def _default() -> Path:
    return groups.conf_dir() / GROUP / "default.yaml"


def _published_width(family: Any) -> int:
    return family.model_fields["hidden_size"].default


@lru_cache
def read(path: Path) -> Recipe:
    """A recipe from its YAML. Raises UserError with the first key that is wrong."""
    hint = f"see {_default()}"
    try:
        return Recipe.model_validate(saved.read_yaml(path, hint))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {place + ': ' if place else ''}{first['msg']}", hint) from error
