"""The configuration of text generation, shared by the command and by tasks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from lmtool.config.base import Config
from lmtool.errors import UserError

GENERATION = "generation_config.json"
HF_FORMAT = {
    "num_beams": "beams", "length_penalty": "length_penalty", "early_stopping": "early_stopping",
    "no_repeat_ngram_size": "no_repeat_ngram", "repetition_penalty": "repetition_penalty",
    "forced_eos_token_id": "forced_eos", "min_new_tokens": "min_new_tokens", "max_new_tokens": "max_new_tokens",
}  # fmt: skip
"""Fields by the keys of a published generation_config.json."""
_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""Fields of sampling, with the defaults of transformers."""


class GenerationConfig(Config):
    """Greedy decoding by default; sampling with a temperature above 0, beam search with several beams."""

    max_new_tokens: int = Field(
        80, ge=1, description="maximum number of new tokens; fewer if the model's maximum length is reached"
    )
    min_new_tokens: int = Field(0, ge=0, description="minimum number of new tokens before the text may end")
    temperature: float = Field(0.0, ge=0, description="0: greedy; above 0: sample with the logits divided by it")
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
        description="beam search: true (stop at as many ended texts as beams), false, never. false: stop when no "
        "continuation of the current length would score better; never: when none of any length would",
    )
    no_repeat_ngram: int = Field(0, ge=0, description="no n-gram of this length occurs twice; 0: no restriction")

    repetition_penalty: float | None = Field(
        None,
        gt=0,
        description="above 1: makes repeated tokens less likely; null: as in a published checkpoint, else 1. The "
        "logits of tokens that the text already contains are divided by it if positive and multiplied otherwise "
        "(Keskar et al. 2019)",
    )
    forced_eos: bool | None = Field(
        None, description="force the end token at the maximum length; null: as in a published checkpoint"
    )

    def with_published(self, settings: Mapping[str, object]) -> GenerationConfig:
        """The configuration with null fields filled from a published checkpoint. settings: see `published_settings`.
        Raises UserError for an invalid value."""
        nulls = {name for name in ("repetition_penalty", "forced_eos") if self.__dict__[name] is None}
        published = {name: value for name, value in settings.items() if name in nulls}
        try:
            return type(self).model_validate({**self.model_dump(), **published})
        except ValidationError as problem:
            penalty = str(published.get("repetition_penalty"))[:60]
            message = f"the checkpoint's {GENERATION} has repetition_penalty={penalty}, which must be above 0"
            raise UserError(message, "set repetition_penalty=1.0") from problem

    def differences(self, settings: Mapping[str, object]) -> list[str]:
        """The settings of a published checkpoint that differ from this configuration, as overrides."""
        plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float)}
        return [f"{name}={str(value).lower()}" for name, value in plain.items() if value != self.__dict__[name]]

    @model_validator(mode="after")
    def _require_one_strategy(self) -> GenerationConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p are for sampling: set temperature=1.0 too")
        if self.temperature > 0 and self.beams > 1:
            raise ValueError(
                f"beams={self.beams} searches but temperature={self.temperature} samples: set only one of them"
            )
        if self.beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping are for beam search: set beams=4 too")
        return self


def published_settings(data: Mapping[str, object]) -> dict[str, object]:
    """The fields that a published generation_config.json sets, or a config.json from before that file existed."""
    settings = {field: data[key] for key, field in HF_FORMAT.items() if data.get(key) is not None}
    if "forced_eos" in settings:
        settings["forced_eos"] = True
    if data.get("do_sample") is True:
        settings |= {key: data.get(key, default) for key, default in _SAMPLING_DEFAULTS.items()}
    return settings
