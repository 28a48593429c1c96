"""What finetuning learns, as configuration: a file a kind. Imports no torch."""

from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.extractive_qa import ExtractiveQaConfig
from lmtool.tasks.configs.glue import GlueConfig
from lmtool.tasks.configs.mixture import MixtureTaskConfig
from lmtool.tasks.configs.multiple_choice import MultipleChoiceConfig
from lmtool.tasks.configs.objective import TaskObjectiveConfig, tasks_of
from lmtool.tasks.configs.seq2seq import ScheduledSamplingConfig, Seq2SeqConfig
from lmtool.tasks.configs.sequence import (
    ClassLossConfig,
    MultiLabelConfig,
    MultiLabelLossConfig,
    RegressionConfig,
    SequenceConfig,
)
from lmtool.tasks.configs.span_classification import SpanClassificationConfig
from lmtool.tasks.configs.text import TaskTextConfig
from lmtool.tasks.configs.tokens import TokenClassificationConfig

__all__ = [
    "ClassLossConfig",
    "ClassificationConfig",
    "ExtractiveQaConfig",
    "GlueConfig",
    "MixtureTaskConfig",
    "MultiLabelConfig",
    "MultiLabelLossConfig",
    "MultipleChoiceConfig",
    "RegressionConfig",
    "ScheduledSamplingConfig",
    "Seq2SeqConfig",
    "SequenceConfig",
    "SpanClassificationConfig",
    "TaskConfig",
    "TaskObjectiveConfig",
    "TaskTextConfig",
    "TokenClassificationConfig",
    "tasks_of",
]
