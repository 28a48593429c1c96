"""How a model is distilled, as configuration: a file a mode, and a file for the terms of each depth."""

from lmtool.distillation.configs.attention import AttentionConfig as AttentionConfig
from lmtool.distillation.configs.attention import RelationsConfig as RelationsConfig
from lmtool.distillation.configs.base import DistillConfig as DistillConfig
from lmtool.distillation.configs.base import NoDistillConfig as NoDistillConfig
from lmtool.distillation.configs.base import TermConfig as TermConfig
from lmtool.distillation.configs.codistillation import CodistillationConfig as CodistillationConfig
from lmtool.distillation.configs.interchange import InterchangeConfig as InterchangeConfig
from lmtool.distillation.configs.interchange import below_the_last as below_the_last
from lmtool.distillation.configs.layers import LayerMap as LayerMap
from lmtool.distillation.configs.layers import layer_map as layer_map
from lmtool.distillation.configs.outputs import HardConfig as HardConfig
from lmtool.distillation.configs.outputs import SoftConfig as SoftConfig
from lmtool.distillation.configs.self_distillation import SelfConfig as SelfConfig
from lmtool.distillation.configs.standard import StandardConfig as StandardConfig
from lmtool.distillation.configs.states import EmbeddingsConfig as EmbeddingsConfig
from lmtool.distillation.configs.states import HiddenConfig as HiddenConfig
from lmtool.distillation.configs.states import PatienceConfig as PatienceConfig
from lmtool.distillation.configs.states import StatesConfig as StatesConfig
