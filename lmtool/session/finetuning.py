"""The session of a finetuning run: labelled rows, tokenizer, learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from lmtool.config.plugins import command_line
from lmtool.data.sources import OnStage
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.learners.base import BaseLearner
from lmtool.resolver.schema.run import FinetuneConfig
from lmtool.session.distilling import distilled
from lmtool.session.forgetting import require_measurable
from lmtool.session.labelled import data_to_learn
from lmtool.session.open_run import OpenRun
from lmtool.session.phases import PhaseData
from lmtool.session.provenance import contents_of, require_same_data
from lmtool.session.session import Session
from lmtool.session.start import base_of, earlier_weights, require_fit, saved_tokenizer, start_weights
from lmtool.session.teacher_store import with_texts
from lmtool.tasks.loading import TaskData
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.assemble import assemble
from lmtool.weights.loading import LoadReport

_SAMPLED_TEXTS = 2000
"""Training texts whose unknown words are counted."""


class Finetuning:
    """Prepares a finetuning run. config: with the task's labels as found in its data, for a checkpoint must know their
    names. task: its data. heads: by task, the head in the checkpoint that the run starts from."""

    verb = "finetune"

    def __init__(self, config: FinetuneConfig):
        require_measurable(config)
        self.config, self.task, self.heads = data_to_learn(config)
        self.stem = f"{self.config.task.name}-{self.config.model.name}"

    def prepare(self, run: OpenRun) -> Session:
        """Build everything that the run needs. UserError where the run resumes and its data have changed, or where
        its parts do not go together."""
        config, task = self.config, self.task
        contents = contents_of(task.members)
        require_same_data(run, contents)
        tokenizer = saved_tokenizer(run) or self.trained_tokenizer(run.output.stage)
        require_fit(config, tokenizer)
        start = start_weights(config, self.heads, run.checkpoint)
        earlier = [] if run.checkpoint is not None else earlier_weights(config)
        learner, loaded = assemble(config, tokenizer, start, earlier=earlier)
        base = base_of(run, learner, start, loaded, tokenizer)
        del start, earlier  # the learner holds what it needs of them
        metadata = self._metadata(tokenizer)
        if run.checkpoint is None:
            metadata["warnings"] += untrained_part_warnings(learner, loaded)
        student = distilled(config, learner, tokenizer, run.precision, contents, self.heads)
        splits, of_texts = with_texts(run, learner, student, task.splits(), contents)
        return Session(
            run=run,
            subject={"model": config.model.name, "task": config.task.name, "tuning": config.tuning.name},
            learner=learner,
            tokenizer=tokenizer,
            loaded=loaded,
            phases=[PhaseData(config, learner, splits)],
            metadata=metadata | of_texts,
            contents=contents,
            next_commands=_next_commands(str(run.folder.path), task.members),
            distilled=student,
            base=base,
            tests=task.labelled_tests() or {},
        )

    def trained_tokenizer(self, on_stage: OnStage) -> Tokenizer:
        """A tokenizer trained on the run's training rows, for a run that starts from random weights."""
        size = self.config.tokenizer.vocab_size or self.config.model.vocab_size
        return tokenizer_of_rows(self.config.tokenizer, self.task.texts(), size, on_stage)

    def _metadata(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Metadata of the data for the first screen."""
        notes = [head.note for head in self.heads.values() if head.note]
        metadata = {**self.task.metadata, **({"head": "; ".join(notes)} if notes else {})}
        unknown = self._unknown_fraction(tokenizer)
        metadata |= {"unknown_fraction": unknown} if unknown else {}
        metadata["warnings"] = [
            *metadata.get("warnings", ()),
            *self.config.tuning.warnings(self.config.optimizer, self.config.model),
        ]
        return metadata

    def _unknown_fraction(self, tokenizer: Tokenizer) -> float:
        """The fraction of the tokens of some training texts that the vocabulary lacks."""
        unknown = tokenizer.roles.get("unk")
        texts = list(islice((text for column in self.task.texts() for text in column), _SAMPLED_TEXTS))
        ids = np.concatenate([np.empty(0, dtype=np.int32), *tokenizer.encode_batch(texts)])
        return 0.0 if unknown is None or not len(ids) else float((ids == unknown).mean())


def untrained_part_warnings(learner: BaseLearner, loaded: LoadReport | None) -> Iterator[str]:
    """Warnings about parts that the task reads, that no checkpoint trained and that this run does not train."""
    backbone = {name: tensor for name, tensor in learner.named_parameters() if part_of(name) == "backbone"}
    frozen = sum(tensor.numel() for name, tensor in backbone.items() if name not in learner.learning)
    if loaded is None and frozen:
        yield (
            f"checkpoint=none: {frozen:,} parameters of the backbone are random and never learn; give checkpoint= of a "
            "pretrained model, or tuning=full"
        )
    for name in learner.pretrained:
        if loaded is None or f"heads.{name}" in loaded.new:
            yield (
                f"heads.{name} is new: what it says of words means nothing yet; checkpoint= with a language model's "
                "head has one (lmtool pretrain, or a published folder of it)"
            )


def _next_commands(folder: str, tasks: Mapping[str, TaskData]) -> list[str]:
    """What the user may type next."""
    name, first = next(iter(tasks.items()))
    task = [f"task={name}"] if len(tasks) > 1 else []
    inputs = {1: ["text=..."], 2: ["text=...", "pair=..."]}.get(len(first.config.reads), ["input=FILE"])
    return [
        command_line("predict", f"checkpoint={folder}", *task, *inputs),
        command_line("evaluate", f"checkpoint={folder}"),
    ]
