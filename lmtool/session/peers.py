"""The peers of a run: further learners of what it learns."""

from __future__ import annotations

from collections.abc import Mapping

from lmtool.costs.memory_of_run import model_of_peers
from lmtool.distillation.configs import CodistillationConfig
from lmtool.distillation.configs.codistillation import reads_otherwise
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.start import earlier_weights, start_weights, starting_tokenizer
from lmtool.tasks.labels import TakenHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.assemble import assemble

TrainingConfig = PretrainConfig | FinetuneConfig


def peers_of(
    config: TrainingConfig,
    distill: CodistillationConfig,
    tokenizer: Tokenizer,
    taken: Mapping[str, TakenHead] | None = None,
) -> list[BaseLearner]:
    """The peers, each as it is at the start of a run with a seed of its own. taken: by task, its head in the run's
    checkpoint. UserError where their weights cannot be read, or do not go with the run."""
    own = _of_peers(config, distill, tokenizer)
    heads = taken if own.checkpoint == config.checkpoint else None
    peers = []
    for number in range(1, distill.learners):
        seeded = own.model_copy(update={"seed": config.seed + number})
        earlier = earlier_weights(seeded) if isinstance(seeded, FinetuneConfig) else []
        learner, _ = assemble(seeded, tokenizer, start_weights(seeded, heads), earlier=earlier)
        peers.append(learner)
    return peers


def _of_peers(config: TrainingConfig, distill: CodistillationConfig, tokenizer: Tokenizer) -> TrainingConfig:
    """The run's configuration with the model of the peers, and what they start from."""
    if distill.model is not None:
        config = config.model_copy(update={"model": distill.model, "checkpoint": None})
        if isinstance(config, FinetuneConfig) and config.tuning.name != "full":
            raise UserError(
                f"tuning={config.tuning.name} edits pretrained weights, and those of distill.model are random",
                "give tuning=full, or distill.checkpoint=RUN in the place of distill.model",
            )
        return config
    if distill.checkpoint is None:
        return config
    model = model_of_peers(config, distill)
    problem = reads_otherwise(f"distill.checkpoint={distill.checkpoint}", model, config.model)
    if problem is not None:
        raise UserError(problem.message, "give another checkpoint, or leave it out")
    config = config.model_copy(update={"model": model, "checkpoint": distill.checkpoint})
    own = starting_tokenizer(config)
    if own is not None and not own.cuts_alike(tokenizer):
        raise UserError(
            f"distill.checkpoint={distill.checkpoint} has another tokenizer than the run: its batches are others",
            f"give tokenizer=folder tokenizer.path={distill.checkpoint}, or another checkpoint",
        )
    return config
