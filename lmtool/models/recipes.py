"""Recipes: the settings of a family's paper, to which `auto` resolves: `conf/recipe/FAMILY.yaml`.

A plugin's recipe is in the folder `recipe/` next to the module of its model's class. A section that a family's recipe
lacks comes from the class it derives from, otherwise from `conf/recipe/default.yaml`. Imports no torch.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from lmtool.config import groups, saved
from lmtool.config.auto import merge
from lmtool.config.base import Config
from lmtool.config.saved import JsonObject
from lmtool.errors import UserError

Section = JsonObject

GROUP = "recipe"
ABSOLUTE_STEPS = ("adam", "adamw", "muon")
"""Optimizers whose learning rate is scaled with the width: their step does not depend on the size of the weights."""
LARGEST_FITTED = 1e-3
"""Maximum learning rate after scaling, because recipes are for large batches. Measured loss with small batches (2,048
tokens): bert_tiny after 700 steps 6.61 with 6e-4, 6.49 with 1e-3, 6.86 with 2e-3; gpt_tiny after 300 steps 5.56 with
1e-3, 5.85 with 3.6e-3."""


class FinetuningSections(Config):
    """Optimization settings."""

    optimizer: Section = Field({}, description="The value of optimizer=auto.")
    schedule: Section = Field({}, description="The value of schedule=auto.")


class PretrainingSections(FinetuningSections):
    """Objective and optimization settings."""

    objective: Section = Field({}, description="The value of objective=auto.")


class Sections(Config):
    """The values of `auto` in each command; an empty section is inherited."""

    tokenizer: Section = Field({}, description="The value of tokenizer=auto, in both commands.")
    pretrain: PretrainingSections = Field(
        default_factory=PretrainingSections, description="The sections of lmtool pretrain."
    )
    finetune: FinetuningSections = Field(
        default_factory=FinetuningSections, description="The sections of lmtool finetune."
    )

    def by_key(self) -> dict[str, Section]:
        """Returns the sections that are not empty, by key such as `pretrain.optimizer`."""
        commands = {"pretrain": self.pretrain, "finetune": self.finetune}
        nested = {f"{command}.{key}": section for command, sections in commands.items() for key, section in sections}
        return {key: section for key, section in ({"tokenizer": self.tokenizer} | nested).items() if section}


class Recipe(Sections):
    """One YAML of the group. Its learning rates are for the default width of the family's class."""

    widths: dict[int, Sections] = Field(
        {}, description="Other values for a model.hidden_size, from papers or measured."
    )

    @model_validator(mode="after")
    def _widths_change_existing_sections(self) -> Recipe:
        for width, sections in self.widths.items():
            for key in sections.by_key().keys() - self.by_key().keys():
                raise ValueError(f"widths.{width}.{key} changes {key}, which the recipe lacks")
        return self

    def at(self, width: int, recipe_width: int) -> dict[str, Section]:
        """Returns the sections by key for a width. A learning rate is scaled unless the recipe lists one for this
        width."""
        sections, changes = self.by_key(), self.widths.get(width, Sections()).by_key()
        scaled = {key: fit(section, width, recipe_width) for key, section in sections.items()}
        return {key: merge(section, changes.get(key, {})) for key, section in scaled.items()}


def fit(section: Section, width: int, recipe_width: int) -> Section:
    """Returns an optimizer section with its learning rate scaled to a width; other sections unchanged.

    A model narrower than the recipe's gets a larger rate, in inverse proportion to the width (Yang et al. 2022, "Tensor
    Programs V", for Adam; the tables of GPT-3, RoBERTa and ELECTRA are within a factor of 1.5 of it), at
    most `LARGEST_FITTED`. A wider one keeps the rate. Finetuning from BERT's 5e-5, widths 256 to 512 get 1.5e-4 to
    7.5e-5, within the rates Google lists for its compact BERTs (3e-4, 1e-4, 5e-5, 3e-5; Turc et al. 2019).
    """
    rate = section.get("lr")
    if rate is None or section.get("name") not in ABSOLUTE_STEPS or section.get("scale_parameter"):
        return section
    narrower = max(rate, min(rate * recipe_width / width, LARGEST_FITTED))
    return {**section, "lr": float(f"{narrower:.3g}")}


def recipe_of(family: type[Config], width: int) -> JsonObject:
    """Returns the sections to which `auto` resolves for a family and width: {"tokenizer": ..., "pretrain":
    {"objective": ..., ...}, "finetune": {...}}. Raises UserError for an invalid recipe."""
    sections = read(_default()).at(width, _recipe_width(family))
    for parent, path in _layers(family):
        sections |= read(path).at(width, _recipe_width(parent))
    nested: JsonObject = {"tokenizer": sections.pop("tokenizer", {}), "pretrain": {}, "finetune": {}}
    for key, section in sections.items():
        command, _, name = key.partition(".")
        nested[command][name] = section
    return nested


def tuning_recipe(method: type[Config], name: str) -> dict[str, Section]:
    """Returns the sections `optimizer` and `schedule` of a tuning method's recipe, `tuning/NAME.yaml` next to those of
    the families, the same at every width. Raises UserError for an invalid recipe."""
    path = tuning_file(method, name)
    return {} if path is None else {key: section for key, section in read(path).finetune if section}


def tuning_file(method: type[Config], name: str) -> Path | None:
    """Returns the recipe file of a tuning method, or None."""
    path = _folder(method) / "tuning" / f"{name}.yaml"
    return path if path.is_file() else None


def files_of(family: type[Config]) -> list[Path]:
    """Returns a family's recipe files by precedence: of its class, of its base classes, the default."""
    return [*(path for _, path in reversed(_layers(family))), _default()]


def _layers(family: type[Config]) -> list[tuple[type[Config], Path]]:
    """Returns the class and its base classes that have a recipe, base classes first."""
    layers = []
    for parent in reversed(family.__mro__):
        field = parent.model_fields.get("name") if issubclass(parent, Config) else None
        if field is not None and isinstance(field.default, str):
            path = _folder(parent) / f"{field.default}.yaml"
            layers += [(parent, path)] if path.is_file() else []
    return layers


def _folder(family: type[Config]) -> Path:
    """Returns the folder of a class's recipe."""
    package, lmtool = (name.partition(".")[0] for name in (family.__module__, __name__))
    file = sys.modules[family.__module__].__file__
    return groups.conf_dir() / GROUP if package == lmtool or file is None else Path(file).parent / GROUP


def _default() -> Path:
    return groups.conf_dir() / GROUP / "default.yaml"


def _recipe_width(family: type[Config]) -> int:
    width: int = family.model_fields["hidden_size"].default
    return width


@lru_cache
def read(path: Path) -> Recipe:
    """Reads a recipe from its YAML. Raises UserError with the first invalid key."""
    hint = f"see {_default()}"
    try:
        return Recipe.model_validate(saved.read_yaml(path, hint))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {location + ': ' if location else ''}{first['msg']}", hint) from error
