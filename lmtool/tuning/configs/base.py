"""What a tuning method is as configuration: a file a method. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from lmtool.config.base import Config
from lmtool.errors import Problem
from lmtool.models import recipes


class TuningConfig(Config):
    """The base of every tuning method. What a paper gives for it, its learning rate above all, stands in
    `conf/recipe/tuning/NAME.yaml`; without one it learns as the model's recipe has it."""

    of_transformers: ClassVar[bool] = True
    """Whether it edits the layers of a transformer; False: any model will do."""
    of_stacks: ClassVar[bool] = False
    """Whether it needs a stack of layers, of whatever kind, where it needs no transformer."""

    name: str = Field(description="Which tuning method.")

    @property
    def builds_on(self) -> tuple[str, ...]:
        """Earlier runs whose additions to the model it takes as they are: none."""
        return ()

    @property
    def recipe_name(self) -> str:
        """Which YAML of `conf/recipe/tuning/` is its: that of its name, where its fields do not choose another."""
        return self.name

    def recipe(self) -> dict[str, Any]:
        """What `optimizer=auto` and `schedule=auto` stand for with this method: by section, {} where its YAML does not
        say."""
        return recipes.of_tuning(type(self), self.recipe_name)

    @property
    def positions(self) -> int:
        """Positions that it takes in every text of the input."""
        return 0

    def positions_taken(self, model: Any) -> int:
        """Those that a text of a model of this configuration lacks then: none where positions have no end."""
        return self.positions if getattr(getattr(model, "positions", None), "ends", False) else 0

    def warnings(self, optimizer: Any, model: Any) -> list[str]:
        """What a user should know before training a model of this configuration with such an optimizer."""
        return []

    @property
    def schemes(self) -> tuple[Config, ...]:
        """The schemes beside the method: when its parameters learn, and what holds them."""
        return ()

    @property
    def needs_start(self) -> bool:
        """Whether the weights that a run starts from are read all along, also where it resumes."""
        return False

    def misfit(self, model: Any, task: Any) -> Problem | None:
        """Why this method does not go with a model's or a task's configuration, if it does not: what is given, why
        not, and the nearest override that does."""
        if self.of_transformers and not hasattr(model, "num_heads"):
            return Problem(
                "tuning",
                f"tuning={self.name} edits the layers of a transformer; model={model.name} is none",
                "give tuning=full or tuning=head",
            )
        if self.of_stacks and not model.depths:
            message = f"tuning={self.name} takes layers of a stack; model={model.name} has none"
            return Problem("tuning", message, "give tuning=full or tuning=head")
        return None


def members_of(task: Any) -> tuple[Any, ...]:
    """The tasks of a mixture; of any other it alone."""
    return task.parts() if hasattr(task, "parts") else (task,)


def sides_read(model: Any, task: Any) -> set[str]:
    """The sides of a batch whose states the heads of a task read."""
    return {member.states_read(model) for member in members_of(task)}


def depth_read(model: Any, task: Any) -> int:
    """How many layers the stack has whose states the heads of a task read; of two the fewer."""
    if model.architecture != "encoder_decoder":
        return model.num_layers
    depths = {"inputs": model.num_layers, "outputs": model.layers_of_decoder}
    return min(depths[side] for side in sides_read(model, task))
