"""The terms over the states of layers. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from lmtool.config.tables import component
from lmtool.distillation.configs.base import TermConfig
from lmtool.distillation.configs.layers import LayerMap, shared_sides
from lmtool.errors import Problem, UserError
from lmtool.models.configs import ModelConfig


class StateTermConfig(TermConfig):
    """The base of terms over states: both models have layers."""

    teaches_heads: ClassVar[bool] = False

    def misfit(self, student: ModelConfig, teacher: ModelConfig, layers: LayerMap | None) -> Problem | None:
        try:
            shared_sides(student, teacher)
        except UserError as error:
            return Problem("distill.terms", error.message, error.hint)
        return None


@component("distill/term", "states", builder="lmtool.distillation.terms.states:States")
class StatesConfig(StateTermConfig):
    """Output states (DistilBERT, Sanh et al. 2019): 1 - cosine of the last hidden states, behind the final norm."""

    stored: ClassVar[bool] = True


@component("distill/term", "hidden", builder="lmtool.distillation.terms.states:Hidden")
class HiddenConfig(StateTermConfig):
    """Hidden states (TinyBERT, Jiao et al. 2020): mean squared error by the layer map, summed over layers."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "patience", builder="lmtool.distillation.terms.states:Patience")
class PatienceConfig(StateTermConfig):
    """Patience (Sun et al. 2019): squared error of the unit vectors of the class token's states, by the layer map."""

    compares_layers: ClassVar[bool] = True


@component("distill/term", "embeddings", builder="lmtool.distillation.terms.states:Embedded")
class EmbeddingsConfig(StateTermConfig):
    """Embeddings (TinyBERT, Jiao et al. 2020): mean squared error of what the first layer reads."""
