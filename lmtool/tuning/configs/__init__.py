"""Which parameters learn, as configuration: a file a method. Imports no torch."""

from lmtool.tuning.configs.adapter import AdapterConfig, AdapterFusionConfig
from lmtool.tuning.configs.base import TuningConfig
from lmtool.tuning.configs.full import FullConfig
from lmtool.tuning.configs.head import HeadConfig
from lmtool.tuning.configs.prefix import PrefixConfig
from lmtool.tuning.configs.prompt import PromptConfig
from lmtool.tuning.configs.ptuning import PTuningConfig

__all__ = [
    "AdapterConfig",
    "AdapterFusionConfig",
    "FullConfig",
    "HeadConfig",
    "PTuningConfig",
    "PrefixConfig",
    "PromptConfig",
    "TuningConfig",
]
