"""Configuration of tuning methods. Imports no torch."""

from typing import TYPE_CHECKING

from lmtool.config.registry import attribute_of

if TYPE_CHECKING:
    from lmtool.tuning.configs.adapter import AdapterConfig, AdapterFusionConfig
    from lmtool.tuning.configs.base import RegularizableConfig, TuningConfig, UnfreezableConfig
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

__getattr__ = attribute_of(__name__, "base", "methods", "adapter")

__all__ = [
    "AdapterConfig",
    "AdapterFusionConfig",
    "BitFitConfig",
    "UnfreezableConfig",
    "FullConfig",
    "HeadConfig",
    "RegularizableConfig",
    "PTuningConfig",
    "PrefixConfig",
    "SoftPromptConfig",
    "Ia3Config",
    "LastLayersConfig",
    "LoraConfig",
    "TuningConfig",
]
