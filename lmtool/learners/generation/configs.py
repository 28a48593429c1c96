"""The configuration of text generation, which `lmtool generate` and generative tasks use. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from lmtool.config.base import Config
from lmtool.errors import UserError

GENERATION = "generation_config.json"
_FIELD_OF_KEY = {
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "repetition_penalty": "repetition_penalty",
    "forced_eos_token_id": "forced_eos",
    "min_new_tokens": "min_new_tokens",
    "max_new_tokens": "max_new_tokens",
}
"""The field of GenerationConfig for each key of a published generation_config.json that has one."""
_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""The sampling fields, with the defaults that transformers uses for keys that generation_config.json omits."""


class GenerationConfig(Config):
    """How tokens are chosen: greedily by default, by sampling if temperature is above 0, by beam search if beams is
    above 1."""

    max_new_tokens: int = Field(
        80, ge=1, description="maximum number of new tokens; fewer if the model's maximum length is reached"
    )
    min_new_tokens: int = Field(0, ge=0, description="minimum number of new tokens before the text may end")
    temperature: float = Field(
        0.0, ge=0, description="0: greedy decoding; above 0: sample from the logits divided by this number"
    )
    top_k: int | None = Field(None, ge=1, description="sample from the k most probable tokens; null: all tokens")
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="sample from the smallest set of tokens with this total probability; null: all tokens",
    )
    beams: int = Field(1, ge=1, description="beam search width; 1: no beam search")
    length_penalty: float = Field(1.0, description="beam search: the score is log-probability / length^length_penalty")
    early_stopping: bool | Literal["never"] = Field(
        False,
        description="when beam search stops: true, false or never. true: as soon as `beams` texts are finished; false: "
        "when no unfinished text would score better than the finished ones if it ended at its current length; never: "
        "when no unfinished text can score better at any length",
    )
    no_repeat_ngram: int = Field(0, ge=0, description="length of n-grams that may occur only once; 0: no restriction")

    repetition_penalty: float | None = Field(
        None,
        gt=0,
        description="above 1: makes repeated tokens less likely; null: the value of the published checkpoint, else 1. "
        "The logits of tokens that the text already contains are divided by it if positive and multiplied otherwise "
        "(Keskar et al. 2019)",
    )
    forced_eos: bool | None = Field(
        None, description="force the end token at the maximum length; null: as the published checkpoint does"
    )

    def with_published(self, settings: Mapping[str, object]) -> GenerationConfig:
        """Returns a copy in which fields that are null have the values of a published checkpoint.

        settings: the result of `published_settings`. Raises UserError if a value is invalid.
        """
        nulls = {name for name in ("repetition_penalty", "forced_eos") if self.__dict__[name] is None}
        published = {name: value for name, value in settings.items() if name in nulls}
        try:
            return type(self).model_validate({**self.model_dump(), **published})
        except ValidationError as problem:
            penalty = str(published.get("repetition_penalty"))[:60]
            message = f"the checkpoint's {GENERATION} has repetition_penalty={penalty}, which must be above 0"
            raise UserError(message, "set repetition_penalty=1.0") from problem

    def differences(self, settings: Mapping[str, object]) -> list[str]:
        """Returns the settings of a published checkpoint that differ from this configuration, as overrides (KEY=VALUE).
        settings: the result of `published_settings`."""
        plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float)}
        return [f"{name}={str(value).lower()}" for name, value in plain.items() if value != self.__dict__[name]]

    @model_validator(mode="after")
    def _require_one_strategy(self) -> GenerationConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p apply to sampling only: set temperature=1.0 too")
        if self.temperature > 0 and self.beams > 1:
            raise ValueError(
                f"beams={self.beams} selects beam search, but temperature={self.temperature} selects sampling: set "
                "only one of them"
            )
        if self.beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping apply to beam search only: set beams=4 too")
        return self


def published_settings(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields that a published checkpoint sets. data: its generation_config.json, or the config.json of a
    checkpoint from the time before that file existed."""
    settings = {field: data[key] for key, field in _FIELD_OF_KEY.items() if data.get(key) is not None}
    if "forced_eos" in settings:
        settings["forced_eos"] = True
    if data.get("do_sample") is True:
        settings |= {key: data.get(key, default) for key, default in _SAMPLING_DEFAULTS.items()}
    return settings
