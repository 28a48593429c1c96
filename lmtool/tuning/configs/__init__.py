"""Which parameters learn, as configuration: a file a method. Imports no torch."""

from lmtool.tuning.configs.base import TuningConfig
from lmtool.tuning.configs.full import FullConfig
from lmtool.tuning.configs.head import HeadConfig

__all__ = [
    "FullConfig",
    "HeadConfig",
    "TuningConfig",
]
