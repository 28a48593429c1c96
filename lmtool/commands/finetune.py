"""`lmtool finetune`: learn a task from labelled text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from lmtool.commands import suite
from lmtool.commands.branches import begin_branch
from lmtool.commands.configs import FinetuneConfig
from lmtool.commands.distilling import distilled
from lmtool.commands.forgetting import measured_before, require_measurable
from lmtool.commands.labelled import LabelledData, data_to_learn
from lmtool.commands.opening import open_run
from lmtool.commands.planning import require_memory
from lmtool.commands.provenance import contents_of, require_same_data
from lmtool.commands.screens import told_again
from lmtool.commands.starting import base_of, earlier_weights, require_fit, saved_tokenizer, start_weights
from lmtool.commands.teacher_texts import with_texts
from lmtool.commands.training import fit
from lmtool.config.plugins import command_line
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.learners.base import BaseLearner
from lmtool.reporting.console import Output
from lmtool.tasks.configs import GlueConfig
from lmtool.tasks.loading import TaskData
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.assemble import assemble
from lmtool.weights.loading import LoadReport

_SAMPLED = 2000
"""Training texts whose unknown words are counted."""


def run(config: FinetuneConfig, overrides: list[str], then: Callable[..., dict[str, Any]] = fit) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json; of several tasks their summary. then: what is done with the
    parts that were built, in the place of `fit`, whose arguments it takes."""
    if isinstance(config.task, GlueConfig):
        return suite.run(config, config.task, overrides, run)
    require_measurable(config)
    config, task, taken = data_to_learn(config)
    choices = {"model": config.model.name, "task": config.task.name, "tuning": config.tuning.name}
    with open_run("finetune", config, f"{config.task.name}-{config.model.name}") as opened:
        finished = opened.folder.result()
        if finished is not None:
            return told_again(opened, finished)
        begin_branch(opened)
        require_memory(config, opened.precision)
        contents = contents_of(task.members)
        require_same_data(opened, contents)
        tokenizer = saved_tokenizer(opened) or own_tokenizer(config, task, opened.output)
        require_fit(config, tokenizer)
        start = start_weights(config, taken, opened.checkpoint)
        earlier = [] if opened.checkpoint is not None else earlier_weights(config)
        learner, loaded = assemble(config, tokenizer, start, earlier=earlier)
        base = base_of(opened, learner, start, loaded, tokenizer)
        del start, earlier  # what stays of them is in the learner
        notes = [head.note for head in taken.values() if head.note]
        facts = {**task.facts, **({"head": "; ".join(notes)} if notes else {}), **unknown_words(task, tokenizer)}
        facts["warnings"] = [*facts.get("warnings", ()), *config.tuning.warnings(config.optimizer)]
        if opened.checkpoint is None:
            facts["warnings"] += _begins_in_vain(learner, loaded)
        forgetting = measured_before(config, learner, opened.precision, opened.output.stage)
        if forgetting is not None:
            facts["forgetting"] = forgetting.facts
        student_of = distilled(config, learner, tokenizer, opened.precision, contents, taken)
        splits, of_texts = with_texts(opened, learner, student_of, task.splits(), contents)
        following = _next(str(opened.folder.path), task.members)
        return then(
            opened,
            learner,
            splits,
            tokenizer,
            loaded,
            choices,
            facts | of_texts,
            contents,
            following,
            task.labelled_tests(),
            base,
            forgetting,
            distilled=student_of,
        )


def own_tokenizer(config: FinetuneConfig, task: LabelledData, output: Output) -> Tokenizer:
    """A run that starts from nothing trains its tokenizer on its own training rows."""
    size = config.tokenizer.vocab_size or config.model.vocab_size
    return tokenizer_of_rows(config.tokenizer, task.texts(), size, output.stage)


def unknown_words(task: LabelledData, tokenizer: Tokenizer) -> dict[str, Any]:
    """The share of the tokens of some training texts that the vocabulary does not have, where it lacks any."""
    unknown = tokenizer.roles.get("unk")
    texts = list(islice((text for column in task.texts() for text in column), _SAMPLED))
    ids = np.concatenate([np.empty(0, dtype=np.int32), *tokenizer.encode_batch(texts)])
    share = 0.0 if unknown is None else float((ids == unknown).mean()) if len(ids) else 0.0
    return {"unknown_fraction": share} if share else {}


def _begins_in_vain(learner: BaseLearner, loaded: LoadReport | None) -> Iterator[str]:
    """What a task is read with that no checkpoint taught."""
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


def _next(folder: str, tasks: Mapping[str, TaskData]) -> list[str]:
    """What may be typed next."""
    name, first = next(iter(tasks.items()))
    named = [f"task={name}"] if len(tasks) > 1 else []
    asked = {1: ["text=..."], 2: ["text=...", "pair=..."]}.get(len(first.config.reads), ["input=FILE"])
    return [
        command_line("predict", f"checkpoint={folder}", *named, *asked),
        command_line("evaluate", f"checkpoint={folder}"),
    ]
