"""Every shipped model preset: YAML equals class defaults, it builds on the meta device, and parameter counts are as
published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.config import saved
from lmtool.config.registry import build, lookup
from lmtool.models.configs import BertConfig, GptConfig, ModelConfig
from lmtool.models.heads.sequence import Pooler
from lmtool.types import Packed

CONF = Path(__file__).parents[2] / "conf" / "model"
PARAMETERS = {
    "bert": 109_482_240,
    "bert_large": 335_141_888,
    "bert_small": 28_763_648,
    "bert_mini": 11_170_560,
    "bert_cased": 108_310_272,
    "bert_large_cased": 333_579_264,
    "roberta": 124_645_632,
    "roberta_large": 355_359_744,
    "spanbert": 108_310_272,
    "spanbert_large": 333_579_264,
    "distilbert": 66_362_880,
    "albert": 11_683_584,
    "albert_large": 17_683_968,
    "albert_xlarge": 58_724_864,
    "albert_xxlarge": 222_595_584,
    "electra": 108_891_648,
    "electra_small": 13_483_008,
    "electra_large": 334_092_288,
    "gpt1": 116_534_784,
    "gpt": 124_439_808,
    "gpt_medium": 354_823_168,
    "gpt_large": 774_030_080,
    "gpt_xl": 1_557_611_200,
    "gpt3": 174_604_259_328,
    "modernbert": 149_014_272,
    "modernbert_large": 394_781_696,
    "ettin_17m": 16_797_440,
    "ettin_32m": 31_883_136,
    "ettin_68m": 68_144_640,
    "bigbird": 127_468_800,
    "bigbird_large": 359_123_968,
    "deberta": 138_601_728,
    "deberta_large": 405_163_008,
    "deberta_v3": 183_831_552,
    "deberta_v3_xsmall": 70_682_112,
    "deberta_v3_small": 141_304_320,
    "deberta_v3_large": 434_012_160,
    "xlnet": 116_718_336,
    "xlnet_large": 360_268_800,
    "llama": 134_515_008,
    "llama_encoder": 134_515_008,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "qwen2": 494_032_768,
    "qwen25_05b": 494_032_768,
    "transformer_xl": 150_838_570,  # its adaptive softmax has 268,968 more
    "elmo": 93_600_864,
    "lstm": 21_922_816,
    "word_vectors": 207_600_000,
    "cnn": 9_360_300,
}


def read(name: str) -> ModelConfig:
    values = written(name)
    return lookup("model", values["name"]).config.model_validate_json(json.dumps(values))


def written(name: str) -> dict[str, Any]:
    """The values of a model's YAML, including its defaults list."""
    values = saved.read_yaml(CONF / f"{name}.yaml")
    for item in values.pop("defaults", []):
        if isinstance(item, dict):
            inside = {group: saved.read_yaml(CONF / group / f"{preset}.yaml") for group, preset in item.items()}
            values = inside | values
        elif item != "_self_":
            values = written(item) | values
    return values


PRESETS = sorted(
    path.stem
    for path in CONF.glob("*.yaml")
    if path.stem != "auto" and read(path.stem).architecture != "encoder_decoder"
)
# Families whose published count includes a pooler.
POOLED = ("bert", "roberta", "spanbert", "albert", "bigbird")


@pytest.mark.parametrize("config", [BertConfig, GptConfig])
def test_yaml_matches_class_defaults(config):
    assert written(config().name) == config().model_dump()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_published_parameter_count(name):
    config = read(name)
    with torch.device("meta"):
        model = build(config, 0)
        heads = [Pooler(config.hidden_size)] if config.name in POOLED else []
    assert all(parameter.is_meta for parameter in model.parameters())
    parameters = sum(parameter.numel() for part in (model, *heads) for parameter in part.parameters())
    if name in PARAMETERS:
        assert parameters == PARAMETERS[name]
    else:
        assert name.endswith("_tiny") and parameters < 2e6


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("_tiny")])
def test_tiny_preset_has_gradients_everywhere(name):
    model = build(read(name), 0)
    model(Packed(torch.arange(9), (4, 5))).square().sum().backward()
    # The initial query vector is used by one objective only.
    assert all(parameter.grad is not None for place, parameter in model.named_parameters() if place != "query.weight")


def test_num_heads_must_divide_hidden_size():
    with pytest.raises(ValueError, match="hidden_size=100 is not a multiple of num_heads=12"):
        BertConfig(hidden_size=100)
