"""How text is generated, as configuration: one set of fields for the command and for tasks. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmtool.config.base import Config


class GenerationConfig(Config):
    """Greedy where nothing else is said; sampling with a temperature, beam search with several beams."""

    max_new_tokens: int = Field(80, ge=1, description="Tokens that are added, at most; less where the model is full.")
    min_new_tokens: int = Field(0, ge=0, description="Tokens before the text may end, at least.")
    temperature: float = Field(
        0.0, ge=0, description="0: the best token each time. Above: drawn, the logits divided by it."
    )
    top_k: int | None = Field(
        None, ge=1, description="Draw from this many best tokens only (Fan et al. 2018). Null: from all."
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Draw from the fewest best tokens of this probability together (Holtzman et al. 2020). Null: from "
        "all.",
    )
    beams: int = Field(1, ge=1, description="Texts that beam search keeps. 1: no beam search.")
    length_penalty: float = Field(
        1.0, description="Of beam search: a text's log-probability is divided by its length to this power."
    )
    early_stopping: bool | Literal["never"] = Field(
        False,
        description="When beam search ends. true: with as many ended texts as beams; false: when none of the length "
        "reached would be better; never: when none of any length would.",
    )
    no_repeat_ngram: int = Field(
        0, ge=0, description="No sequence of this many tokens comes twice (Paulus et al. 2018). 0: any may."
    )

    @model_validator(mode="after")
    def _of_one_method(self) -> GenerationConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p are of sampling: give temperature=1.0 too")
        if self.temperature > 0 and self.beams > 1:
            raise ValueError(f"beams={self.beams} searches and temperature={self.temperature} draws: give one of them")
        if self.beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping are of beam search: give beams=4 too")
        return self
