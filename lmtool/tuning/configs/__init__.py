"""Which parameters learn, as configuration: a file a method. Imports no torch."""

from lmtool.tuning.configs.adapter import AdapterConfig, AdapterFusionConfig
from lmtool.tuning.configs.base import TuningConfig
from lmtool.tuning.configs.bitfit import BitFitConfig
from lmtool.tuning.configs.full import FullConfig
from lmtool.tuning.configs.head import HeadConfig
from lmtool.tuning.configs.ia3 import Ia3Config
from lmtool.tuning.configs.last_n import LastLayersConfig
from lmtool.tuning.configs.lora import LoraConfig
from lmtool.tuning.configs.prefix import PrefixConfig
from lmtool.tuning.configs.prompt import PromptConfig
from lmtool.tuning.configs.ptuning import PTuningConfig
from lmtool.tuning.configs.schemes import ByDepthConfig, OfPretrainedConfig

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
    "PromptConfig",
    "Ia3Config",
    "LastLayersConfig",
    "LoraConfig",
    "TuningConfig",
]
