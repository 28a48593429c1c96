"""Prepares a run's session: reads its text or labeled rows, its tokenizer and its weights, and builds its learner. One
class does this for pretraining, another for finetuning."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.config.registry import command_line
from lmtool.data.configs import DataConfig
from lmtool.data.examples import SplitData
from lmtool.data.files import find
from lmtool.data.sources import OnStage, Source, open_source
from lmtool.data.vocabulary import tokenizer_of_rows, trained_tokenizer
from lmtool.learners.base import BaseLearner, Responder
from lmtool.reporting.text import plain
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig
from lmtool.session.forgetting import require_measurable
from lmtool.session.labeled import data_to_learn
from lmtool.session.open_run import (
    OpenRun,
    base_of,
    prior_weights,
    require_fit,
    saved_tokenizer,
    start_weights,
    unused_rows_warning,
)
from lmtool.session.provenance import Contents, contents_of, require_same_data
from lmtool.session.session import PhaseData, Session, build_phases, tokenized_metadata, tokenized_split
from lmtool.session.teacher_texts import with_teacher_texts
from lmtool.session.teachers import build_distilled
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.minimal_pairs import MinimalPairsConfig
from lmtool.tasks.files import suffixes
from lmtool.tasks.loading import TaskData
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.assemble import LoadReport, assemble
from lmtool.weights.exporting import head_caveat, model_caveat

_PROMPT_WORDS = 5  # number of words of the held-out text in the prompt that the last screen suggests
_PROMPT_TOKENS = 40  # maximum number of tokens that are decoded to get these words


class PretrainPreparation:
    """Prepares a pretraining run.

    config: the tasks mixed with its objectives have the labels found in their data, `tasks`. started: when the
    preparation started, on the clock of `time.monotonic`. stem: the start of the name of a run without name=; a number
    is added to it.
    """

    verb = "pretrain"

    def __init__(self, config: PretrainConfig):
        self.started = time.monotonic()
        if config.minimal_pairs is not None:
            find("minimal_pairs", config.minimal_pairs, suffixes(MinimalPairsConfig()))
        objective, self.tasks = read_tasks(config.objective, config.seed, config.cache_dir, config.offline)
        self.config = config.model_copy(update={"objective": objective})
        self.stem = f"{objective.name}-{config.model.name}"
        self._sources: list[tuple[DataConfig, Source]] = []

    def prepare(self, run: OpenRun) -> Session:
        """Builds the run's session. Raises UserError if the data of a resumed run have changed, or if the tokenizer,
        the model and the weights do not fit each other."""
        config, on_stage = self.config, run.output.stage
        tokenizer = saved_tokenizer(run)
        contents, metadata = self._provenance(on_stage)
        require_same_data(run, contents)
        tokenizer = tokenizer or self.trained_tokenizer(on_stage)
        require_fit(config, tokenizer)
        by_phase: list[dict[str, SplitData]] = []
        sections = [phase.data for phase in config.phase_configs]
        for number, phase in enumerate(config.phase_configs):
            # Phases with the same `data` section share the tokenized text of the first of them.
            first_number = sections.index(phase.data)
            splits = ("train", "validation") if first_number == number else ()
            tokenized = {split: self.split(phase, split, tokenizer, on_stage) for split in splits}
            by_phase.append(tokenized or by_phase[first_number])
        metadata["tokenized"] = tokenized_metadata(by_phase[0]["train"])
        learner, loaded = assemble(config, tokenizer, start_weights(config, resumed_from=run.checkpoint))
        if loaded is None:
            metadata["warnings"] = [*metadata.get("warnings", ()), *unused_rows_warning(config, tokenizer)]
        if caveat := model_caveat(config.model):
            metadata["export"] = caveat
        return Session(
            run=run,
            subject={"model": config.model.name, "objective": config.objective.name, "data": config.data.name},
            learner=learner,
            tokenizer=tokenizer,
            loaded=loaded,
            phases=build_phases(config, learner, tokenizer, by_phase),
            metadata=metadata,
            contents=contents,
            next_commands=_commands_after_pretraining(
                config, str(run.folder.path), tokenizer, learner, by_phase[-1]["validation"]
            ),
            distilled=build_distilled(config, learner, tokenizer, run.precision, contents),
        )

    def source(self, data: DataConfig, on_stage: OnStage) -> Source:
        """Opens the text of a `data` section; later calls with an equal section return the same object."""
        for section, source in self._sources:
            if section == data:
                return source
        source = open_source(data, self.config.cache_dir, on_stage, self.config.offline)
        self._sources.append((data, source))
        return source

    def trained_tokenizer(self, on_stage: OnStage, data: DataConfig | None = None) -> Tokenizer:
        """Trains a tokenizer on the text of a `data` section; None means the section of the first phase."""
        config = self.config
        size = config.tokenizer.vocab_size or config.model.vocab_size
        source = self.source(data or config.phase_configs[0].data, on_stage)
        return trained_tokenizer(config.tokenizer, source, size, config.cache_dir, on_stage)

    def split(self, config: PretrainConfig, split: str, tokenizer: Tokenizer, on_stage: OnStage) -> SplitData:
        """Tokenizes a split of the text of a phase. config: the configuration of the phase."""
        source, rows = self.source(config.data, on_stage), rows_of(self.tasks, split)
        return tokenized_split(config.data, source, split, tokenizer, config.cache_dir, on_stage, rows)

    def _provenance(self, on_stage: OnStage) -> tuple[Contents, JsonObject]:
        phase_configs = self.config.phase_configs
        first_source = self.source(phase_configs[0].data, on_stage)
        contents = contents_of(self.tasks, (phase_configs[0].data.name, first_source))
        metadata = {**first_source.metadata(), **{f"task {name}": task.metadata for name, task in self.tasks.items()}}
        sources = [first_source]
        for index, phase in enumerate(phase_configs[1:], 1):
            source = self.source(phase.data, on_stage)
            if source not in sources:
                phase_contents = contents_of({}, (phase.data.name, source))
                contents |= {f"phases.{index} {name}": content for name, content in phase_contents.items()}
                metadata[f"text of phase {index + 1}"] = source.metadata()
                sources.append(source)
        return contents, metadata


def _commands_after_pretraining(
    config: PretrainConfig, folder: str, tokenizer: Tokenizer, learner: BaseLearner, held_out: SplitData
) -> list[str]:
    task = "pydocs" if config.data.name == "pydocs" else "FILE"
    finetune = command_line("finetune", f"task={task}", f"checkpoint={folder}")
    responder = learner.responder()
    if type(responder) is Responder:  # the learner has no predictions for texts
        return [finetune]
    # For a responder that fills masks, the prompt ends with a mask.
    mask = tokenizer.roles.get("mask") if responder.fills_masks else None
    prompt = _prompt(held_out, tokenizer)
    prompt = prompt if mask is None else f"{prompt} {tokenizer.pieces([mask])[0]}"
    if responder.continues:
        return [command_line("generate", f"checkpoint={folder}", f"prompt={prompt}"), finetune]
    return [finetune, command_line("predict", f"checkpoint={folder}", f"text={prompt}")]


def _prompt(held_out: SplitData, tokenizer: Tokenizer) -> str:
    text = next((split.store for split in (held_out, *held_out.members.values()) if split.store is not None), None)
    if text is None or not len(text):
        return "This function returns"
    tokens = text.tokens[: min(_PROMPT_TOKENS, int(text.lengths[0]))]
    return " ".join(plain(tokenizer.decode(tokens.tolist())).split()[:_PROMPT_WORDS]).strip("\"'“”‘’ ")


_SAMPLED_TEXTS = 2000
"""Number of training texts in which unknown tokens are counted."""


class FinetunePreparation:
    """Prepares a finetuning run.

    config: its tasks have the labels found in their data, `task`. started, stem: see `PretrainPreparation`. heads: for
    each task that has one, its head in the starting checkpoint.
    """

    verb = "finetune"

    def __init__(self, config: FinetuneConfig):
        self.started = time.monotonic()
        if config.forgetting is not None:
            require_measurable(config)
        self.config, self.task, self.heads = data_to_learn(config)
        self.stem = f"{self.config.task.name}-{self.config.model.name}"

    def prepare(self, run: OpenRun) -> Session:
        """Builds the run's session. Raises UserError if the data of a resumed run have changed, or if the tokenizer,
        the model and the weights do not fit each other."""
        config, task = self.config, self.task
        contents = contents_of(task.members)
        held_out = [
            str(member.metadata["held out"]) for member in task.members.values() if "held out" in member.metadata
        ]
        require_same_data(run, contents, [f"now held out: {rows}" for rows in held_out])
        tokenizer = saved_tokenizer(run) or self.trained_tokenizer(run.output.stage)
        require_fit(config, tokenizer)
        start = start_weights(config, self.heads, run.checkpoint)
        earlier = [] if run.checkpoint is not None else prior_weights(config)
        learner, loaded = assemble(config, tokenizer, start, earlier=earlier)
        base = base_of(run, learner, start, loaded, tokenizer)
        del start, earlier  # frees memory: the learner has copies of these weights
        metadata = self._metadata(tokenizer, learner)
        if run.checkpoint is None:
            metadata["warnings"] += untrained_part_warnings(learner, config.task.member_configs(), loaded)
        if loaded is None:
            metadata["warnings"] += unused_rows_warning(config, tokenizer)
        student = build_distilled(config, learner, tokenizer, run.precision, contents, self.heads)
        splits, text_metadata = with_teacher_texts(run, learner, student, task.splits(), contents)
        return Session(
            run=run,
            subject={"model": config.model.name, "task": config.task.name, "tuning": config.tuning.name},
            learner=learner,
            tokenizer=tokenizer,
            loaded=loaded,
            phases=[PhaseData(config, learner, splits)],
            metadata=metadata | text_metadata,
            contents=contents,
            next_commands=_commands_after_finetuning(str(run.folder.path), task.members),
            distilled=student,
            base=base,
            tests=task.labeled_tests() or {},
        )

    def trained_tokenizer(self, on_stage: OnStage) -> Tokenizer:
        """Trains a tokenizer on the texts of the training rows, for a run that starts from random weights."""
        size = self.config.tokenizer.vocab_size or self.config.model.vocab_size
        return tokenizer_of_rows(self.config.tokenizer, self.task.texts(), size, on_stage)

    def _metadata(self, tokenizer: Tokenizer, learner: BaseLearner) -> JsonObject:
        head_notes = [head.note for head in self.heads.values() if head.note]
        unknown_fraction = self._unknown_fraction(tokenizer)
        warnings = self.config.tuning.warnings(self.config.scaled_optimizer, self.config.model)
        metadata: JsonObject = self.task.metadata
        # A task whose answers the language model writes has no head of its own.
        parts = set(map(part_of, learner.state_dict()))
        members = [member for member in self.config.task.member_configs() if f"heads.{member.name}" in parts]
        sections = (member.model_dump(mode="json") for member in members)
        model = self.config.model
        caveats = filter(None, (model_caveat(model), *(head_caveat(model, section) for section in sections)))
        return {
            **metadata,
            **({"export": caveat} if (caveat := next(caveats, None)) else {}),
            **({"head": "; ".join(head_notes)} if head_notes else {}),
            **({"unknown_fraction": unknown_fraction} if unknown_fraction else {}),
            "warnings": [*metadata.get("warnings", ()), *warnings],
        }

    def _unknown_fraction(self, tokenizer: Tokenizer) -> float:
        unknown_id = tokenizer.roles.get("unk")
        texts = list(islice((text for column in self.task.texts() for text in column), _SAMPLED_TEXTS))
        ids = np.concatenate([np.empty(0, dtype=np.int32), *tokenizer.encode_batch(texts)])
        return 0.0 if unknown_id is None or not len(ids) else float((ids == unknown_id).mean())


def untrained_part_warnings(
    learner: BaseLearner, tasks: Iterable[TaskConfig], loaded: LoadReport | None
) -> Iterator[str]:
    """Yields warnings about parts of the model that stay random: neither the checkpoint nor this run trains them."""
    backbone = {name: tensor for name, tensor in learner.named_parameters() if part_of(name) == "backbone"}
    frozen_count = sum(tensor.numel() for name, tensor in backbone.items() if name not in learner.trainable_names)
    if loaded is None and frozen_count:
        yield (
            f"checkpoint=none: {frozen_count:,} parameters of the backbone are random and frozen; set checkpoint= to a "
            "pretrained model, or tuning=full"
        )
    for name in dict.fromkeys(name for task in tasks for name in task.pretrained_heads(learner.backbone.config)):
        if loaded is None or f"heads.{name}" in loaded.new:
            yield (
                f"heads.{name} is new and predicts random words; set checkpoint= to a checkpoint with a language "
                "modeling head (a run of lmtool pretrain, or a published folder)"
            )


def _commands_after_finetuning(folder: str, tasks: Mapping[str, TaskData]) -> list[str]:
    name, first = next(iter(tasks.items()))
    task_override = [f"task={name}"] if len(tasks) > 1 else []
    input_overrides = {1: ["text=..."], 2: ["text=...", "pair=..."]}.get(len(first.config.reads), ["input=FILE"])
    return [
        command_line("predict", f"checkpoint={folder}", *task_override, *input_overrides),
        command_line("evaluate", f"checkpoint={folder}"),
    ]
