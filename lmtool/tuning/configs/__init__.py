"""Which parameters learn, as configuration: a file a method. Imports no torch."""

from lmtool.tuning.configs.adapter import AdapterConfig, AdapterFusionConfig
from lmtool.tuning.configs.base import ByDepthConfig, OfPretrainedConfig, TuningConfig
from lmtool.tuning.configs.methods import (
    BitFitConfig,
    FullConfig,
    HeadConfig,
    Ia3Config,
    LastLayersConfig,
    LoraConfig,
    PrefixConfig,
    PTuningConfig,
    SoftPromptConfig,
)

__all__ = [
    "AdapterConfig",
    "AdapterFusionConfig",
    "BitFitConfig",
    "ByDepthConfig",
    "FullConfig",
    "HeadConfig",
    "OfPretrainedConfig",
    "PTuningConfig",
    "PrefixConfig",
    "SoftPromptConfig",
    "Ia3Config",
    "LastLayersConfig",
    "LoraConfig",
    "TuningConfig",
]
