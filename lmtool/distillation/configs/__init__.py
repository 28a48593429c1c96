"""Configuration of distillation: the modes, and the terms."""

from typing import TYPE_CHECKING

from lmtool.config.registry import attribute_of

if TYPE_CHECKING:
    from lmtool.distillation.configs.base import DistillConfig as DistillConfig
    from lmtool.distillation.configs.base import LayerMap as LayerMap
    from lmtool.distillation.configs.base import NoDistillConfig as NoDistillConfig
    from lmtool.distillation.configs.base import TermConfig as TermConfig
    from lmtool.distillation.configs.base import layer_map as layer_map
    from lmtool.distillation.configs.modes import CodistillationConfig as CodistillationConfig
    from lmtool.distillation.configs.modes import SelfConfig as SelfConfig
    from lmtool.distillation.configs.modes import StandardConfig as StandardConfig
    from lmtool.distillation.configs.terms import AttentionConfig as AttentionConfig
    from lmtool.distillation.configs.terms import EmbeddingsConfig as EmbeddingsConfig
    from lmtool.distillation.configs.terms import HardConfig as HardConfig
    from lmtool.distillation.configs.terms import HiddenConfig as HiddenConfig
    from lmtool.distillation.configs.terms import InterchangeConfig as InterchangeConfig
    from lmtool.distillation.configs.terms import PatienceConfig as PatienceConfig
    from lmtool.distillation.configs.terms import RelationsConfig as RelationsConfig
    from lmtool.distillation.configs.terms import SoftConfig as SoftConfig
    from lmtool.distillation.configs.terms import StatesConfig as StatesConfig
    from lmtool.distillation.configs.terms import aligned_below_last as aligned_below_last

__getattr__ = attribute_of(__name__, "base", "modes", "terms")
