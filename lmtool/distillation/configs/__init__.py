"""How a model is distilled, as configuration: a file a mode, and a file for the terms of each depth."""

from lmtool.distillation.configs.base import DistillConfig as DistillConfig
from lmtool.distillation.configs.base import LayerMap as LayerMap
from lmtool.distillation.configs.base import ModelPair as ModelPair
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
from lmtool.distillation.configs.terms import below_the_last as below_the_last
