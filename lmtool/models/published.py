"""Helpers for conversions between our configurations and transformers' config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import TransformerConfig
from lmtool.nn.configs import RotaryPositionsConfig

ConfigKey = tuple[str, Any]
"""A key of config.json: our field, and transformers' value if the key is missing. None: the field is then left out."""

# Keys that do not affect a model's outputs.
_NEUTRAL = """
_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache pad_token_id bos_token_id
eos_token_id sep_token_id cls_token_id decoder_start_token_id gradient_checkpointing id2label label2id num_labels
problem_type return_dict output_attentions output_hidden_states output_past task_specific_params tokenizer_class
classifier_dropout summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
finetuning_task forced_bos_token_id forced_eos_token_id prefix directionality chunk_size_feed_forward is_encoder_decoder
_num_labels language name qa_dropout seq_classif_dropout tie_weights_ classifier_dropout_prob summary_last_dropout
mem_len reuse_len use_mems_eval use_mems_train start_n_top end_n_top
"""
NEUTRAL = frozenset(_NEUTRAL.split())


class HFConfig(dict[str, Any]):
    """A config.json that records which of its keys were read."""

    def __init__(self, data: Mapping[str, object]):
        super().__init__(data)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys that were not read and might matter, sorted."""
        return tuple(sorted(set(self) - self._read - NEUTRAL))


def default_label(number: int) -> str:
    """Returns the label that transformers gives to a class without a name."""
    return f"LABEL_{number}"


def expect(data: Mapping[str, object], family: str, **allowed: tuple[Any, ...]) -> None:
    """Raises UserError for unsupported values. data: content of config.json. family: our name of the family. allowed:
    supported values by key. A missing key or null means the first value."""
    for key, values in allowed.items():
        value = data.get(key)
        if value is not None and value not in values:
            supported = " or ".join("null" if option is None else str(option) for option in values)
            message = f"config.json: {key}={value!r}, but model={family} supports only {supported}"
            raise UserError(message, "use another checkpoint")


def require_positions(config: TransformerConfig, kind: str, title: str) -> None:
    """Raises UserError if the positions are not of the kind that transformers has for the family. kind: the kind in
    transformers. title: the family's name."""
    if config.positions.name != kind:
        raise UserError(
            f"model.positions={config.positions.name}: {title} in transformers supports only {kind}",
            f"use the run with lmtool, or train a new run with model/positions={kind}",
        )


def require_half_split(positions: RotaryPositionsConfig, title: str) -> None:
    """Raises UserError if rotary pairs are interleaved, which transformers does not support. title: the family's
    name."""
    if positions.layout != "half_split":
        raise UserError(
            f"model.positions.layout={positions.layout}: {title} in transformers supports only half_split",
            "use the run with lmtool, or train a new run with model.positions.layout=half_split",
        )


def section_fields(data: Mapping[str, object], fields: Mapping[str, ConfigKey]) -> JsonObject:
    """Returns the fields of a `model` section for the keys of a config.json. null is as good as missing."""
    section = {field: default if data.get(key) is None else data[key] for key, (field, default) in fields.items()}
    return {field: value for field, value in section.items() if value is not None}
