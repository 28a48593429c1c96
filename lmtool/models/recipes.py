"""Recipes: the published settings of a family, which `auto` stands for, in `conf/recipe/FAMILY.yaml`.

The recipe of a plugin's model is in the folder `recipe/` next to the module of the model's class. If a family's recipe
lacks a section, the recipe of its base class is used, and then `conf/recipe/default.yaml`. Imports no torch.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from lmtool.config import groups, saved
from lmtool.config.base import Config, JsonObject
from lmtool.config.decode import merge
from lmtool.errors import UserError

Section = JsonObject

GROUP = "recipe"
SCALED_OPTIMIZERS = ("adam", "adamw", "muon")
"""Optimizers whose learning rate is scaled with the width, because the size of their steps does not depend on the size
of the weights."""
MAX_SCALED_RATE = 1e-3
"""Maximum learning rate after scaling. A maximum is needed because recipes are for large batches. Measured loss with
small batches (2,048 tokens): bert_tiny after 700 steps 6.61 with 6e-4, 6.49 with 1e-3, 6.86 with 2e-3; gpt_tiny after
300 steps 5.56 with 1e-3, 5.85 with 3.6e-3."""


class FinetuningSections(Config):
    """The sections of lmtool finetune."""

    optimizer: Section = Field({}, description="The value of optimizer=auto.")
    schedule: Section = Field({}, description="The value of schedule=auto.")


class PretrainingSections(FinetuningSections):
    """The sections of lmtool pretrain."""

    objective: Section = Field({}, description="The value of objective=auto.")


class Sections(Config):
    """The values that `auto` stands for in each command. An empty section is inherited from the base class's recipe."""

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
    """The content of a recipe file. The learning rates are for the default width of the family's class."""

    widths: dict[int, Sections] = Field(
        {}, description="Other values for a model.hidden_size, from papers or measured."
    )

    @model_validator(mode="after")
    def _widths_change_existing_sections(self) -> Recipe:
        for width, sections in self.widths.items():
            for key in sections.by_key().keys() - self.by_key().keys():
                raise ValueError(f"widths.{width}.{key} changes {key}, which the recipe lacks")
        return self

    def sections_at(self, width: int, recipe_width: int) -> dict[str, Section]:
        """Returns the sections by key for a width. A learning rate is scaled from `recipe_width`, unless the recipe
        lists one for this width."""
        sections, changes = self.by_key(), self.widths.get(width, Sections()).by_key()
        scaled = {key: scale_rate(section, width, recipe_width) for key, section in sections.items()}
        return {key: merge(section, changes.get(key, {})) for key, section in scaled.items()}


def scale_rate(section: Section, width: int, recipe_width: int) -> Section:
    """Returns an optimizer section with its learning rate scaled to a width, and other sections unchanged.

    A model narrower than the recipe's gets a larger rate, in inverse proportion to the width (Yang et al. 2022, "Tensor
    Programs V", for Adam), at most `MAX_SCALED_RATE`. The published rates of GPT-3, RoBERTa and ELECTRA are within a
    factor of 1.5 of this rule. A wider model keeps the rate. With BERT's finetuning rate, 5e-5, widths from 256 to 512
    get 1.5e-4 to 7.5e-5, which is within the rates that Google lists for its compact BERTs (3e-4, 1e-4, 5e-5, 3e-5;
    Turc et al. 2019).
    """
    rate = section.get("lr")
    if rate is None or section.get("name") not in SCALED_OPTIMIZERS or section.get("scale_parameter"):
        return section
    scaled = max(rate, min(rate * recipe_width / width, MAX_SCALED_RATE))
    return {**section, "lr": float(f"{scaled:.3g}")}


def recipe_of(family: type[Config], width: int) -> JsonObject:
    """Returns the sections that `auto` stands for with a family and a width: {"tokenizer": ..., "pretrain":
    {"objective": ..., ...}, "finetune": {...}}. Raises UserError for an invalid recipe."""
    sections = read(_default()).sections_at(width, _recipe_width(family))
    for ancestor, path in _files_by_class(family):
        sections |= read(path).sections_at(width, _recipe_width(ancestor))
    nested: JsonObject = {"tokenizer": sections.pop("tokenizer", {}), "pretrain": {}, "finetune": {}}
    for key, section in sections.items():
        command, _, name = key.partition(".")
        nested[command][name] = section
    return nested


def tuning_recipe(method: type[Config], name: str) -> dict[str, Section]:
    """Returns the sections `optimizer` and `schedule` of a tuning method's recipe, which do not depend on the width.
    The file is `tuning/NAME.yaml` in the folder of the families' recipes. Raises UserError for an invalid recipe."""
    path = tuning_file(method, name)
    return {} if path is None else {key: section for key, section in read(path).finetune if section}


def tuning_file(method: type[Config], name: str) -> Path | None:
    """Returns the recipe file of a tuning method, or None."""
    path = _folder(method) / "tuning" / f"{name}.yaml"
    return path if path.is_file() else None


def files_of(family: type[Config]) -> list[Path]:
    """Returns a family's recipe files by precedence: that of its class, those of its base classes, and the default."""
    return [*(path for _, path in reversed(_files_by_class(family))), _default()]


def _files_by_class(family: type[Config]) -> list[tuple[type[Config], Path]]:
    """Returns the recipe files of a family's class and of its base classes, base classes first."""
    files = []
    for ancestor in reversed(family.__mro__):
        field = ancestor.model_fields.get("name") if issubclass(ancestor, Config) else None
        if field is not None and isinstance(field.default, str):
            path = _folder(ancestor) / f"{field.default}.yaml"
            files += [(ancestor, path)] if path.is_file() else []
    return files


def _folder(family: type[Config]) -> Path:
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
    """Reads a recipe file. Raises UserError with the first invalid key."""
    hint = f"see {_default()}"
    try:
        return Recipe.model_validate(saved.read_yaml(path, hint))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {location + ': ' if location else ''}{first['msg']}", hint) from error
