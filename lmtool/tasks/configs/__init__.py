"""Configuration of finetuning tasks, one module per group of kinds. Imports no torch."""

from typing import TYPE_CHECKING

from lmtool.config.registry import attribute_of

if TYPE_CHECKING:
    from lmtool.tasks.configs.base import TaskConfig
    from lmtool.tasks.configs.classification import ClassificationConfig, MultipleChoiceConfig
    from lmtool.tasks.configs.mixture import (
        GlueConfig,
        MixtureTaskConfig,
        TaskObjectiveConfig,
        TaskTextConfig,
        tasks_of,
    )
    from lmtool.tasks.configs.sequence import (
        ClassLossConfig,
        MultiLabelConfig,
        MultiLabelLossConfig,
        RegressionConfig,
        SequenceConfig,
    )
    from lmtool.tasks.configs.texts import (
        ExtractiveQaConfig,
        ScheduledSamplingConfig,
        Seq2SeqConfig,
        SpanClassificationConfig,
        TokenClassificationConfig,
    )

__getattr__ = attribute_of(__name__, "base", "sequence", "mixture", "classification", "texts")

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
