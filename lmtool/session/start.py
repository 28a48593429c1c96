"""What a run starts from: the tokenizer, the weights, the labels of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmtool.config.checkpoint import find
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.resolver.matcher import missing_token, tokens_around
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.teachers import TeacherSpec, differing_tokenizer
from lmtool.runs.checkpoints import tensor_names
from lmtool.session.open_run import OpenRun
from lmtool.tasks.labels import TakenHead
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.bases import Base, digest, left_to_base, saved_base
from lmtool.weights.folders import published_folder, tokenizer_folder
from lmtool.weights.load import saved_config
from lmtool.weights.loading import LoadReport
from lmtool.weights.merging import merged
from lmtool.weights.reading import Weights, read, read_base


def saved_tokenizer(opened: OpenRun) -> Tokenizer | None:
    """The tokenizer this run must use: of its own checkpoint, else of the one it starts from; else None."""
    if opened.checkpoint is not None:
        return Tokenizer.load(opened.checkpoint, opened.config.tokenizer.parse_special_tokens)
    return starting_tokenizer(opened.config)


def starting_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the checkpoint the weights start from, or else of the teacher, or of the hub; None where none
    of them is named."""
    origin = starts_from(config) or _vocabulary_of(config)
    if origin is None:
        return hub_tokenizer(config.tokenizer, config.offline)
    published = published_folder(origin, config.offline)
    folder = find(origin) if published is None else published.path
    return Tokenizer.load(folder, config.tokenizer.parse_special_tokens)


def _vocabulary_of(config: RunConfig) -> str | None:
    """The teacher whose vocabulary the run has; None where its files are named, and where there is no such teacher."""
    for path in config.distill.checkpoints[:1] if not isinstance(config.tokenizer, FolderConfig) else ():
        if config.distill.same_batches:
            return path
        theirs = TeacherSpec(path, saved_config(path, config.offline)).tokenizer
        if differing_tokenizer(config.tokenizer, theirs) is None:
            return path
    return None


def hub_tokenizer(config: TokenizerConfig, offline: bool) -> Tokenizer | None:
    """The tokenizer of a `tokenizer.path=hf://...`; None for any other."""
    if not isinstance(config, FolderConfig) or "://" not in config.path:
        return None
    return Tokenizer.load(tokenizer_folder(config.path, offline), config.parse_special_tokens)


def starts_from(config: RunConfig) -> str | None:
    """The checkpoint the weights start from; None for random ones."""
    return None if config.checkpoint in (None, "none") else config.checkpoint


def require_fit(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Every token needs its row of the embedding, and a vocabulary that came with its files the special tokens that
    are asked for. UserError before any text is read with it."""
    model = config.model
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, model.vocab_size={model.vocab_size:,} has fewer rows",
            f"model.vocab_size={tokenizer.vocab_size}, or a smaller tokenizer.vocab_size=",
        )
    roles = {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])}
    parts = config.objective.parts() if isinstance(config, PretrainConfig) else ()
    tasks = config.task.parts() if isinstance(config, FinetuneConfig) else ()
    layouts: list[str | None] = [task.text_format(model) for task in tasks]
    around = [missing_token(tokens_around(model, layout), roles) for layout in layouts or [None]]
    for problem in (*around, *(missing_token(part.needs(), roles) for part in parts)):
        if problem is not None:
            have = ", ".join(sorted(roles)) or "none"
            raise UserError(
                f"the tokenizer {problem}; its special tokens are: {have}",
                "take a tokenizer that fits (tokenizer=auto, with checkpoint=none), or another objective",
            )


def start_weights(
    config: RunConfig, taken: Mapping[str, TakenHead] | None = None, own: Path | None = None
) -> Weights | None:
    """The weights the run starts from; of a tuned run what its method added is merged. taken: by task, its head in
    them. own: the checkpoint of the run itself that it resumes from: one that holds everything needs them no more,
    unless the run reads them all along. None where they are random, or gone. UserError where they cannot be read, or
    are not those the run was started with."""
    origin = starts_from(config)
    if origin is None:
        return None
    base = None if own is None else saved_base(own)
    if own is not None and base is not None:
        weights = read_base(base, tensor_names(own), str(own), config.offline)
    else:
        try:
            weights = merged(read(origin, config.offline), saved_config(origin, config.offline))
        except UserError:
            if own is None or (isinstance(config, FinetuneConfig) and config.tuning.needs_start):
                raise
            return None
    for task, head in (taken or {}).items():
        weights = replace(weights, tensors=head.tensors(weights.tensors, task))
    return weights


def base_of(
    opened: OpenRun, learner: BaseLearner, start: Weights | None, loaded: LoadReport | None, tokenizer: Tokenizer
) -> Base | None:
    """What the checkpoints of a run leave to the one that it starts from; None where they hold everything."""
    resumes = opened.checkpoint
    if start is None or loaded is None or start.merged or (resumes is not None and saved_base(resumes) is None):
        return None
    names = left_to_base(learner, loaded)
    if not names:
        return None
    path = None if start.revision is not None else str(start.folder.expanduser().resolve())
    sha256 = digest({name: start.tensors[name] for name in names})
    parts = tuple(sorted({part_of(name) for name in names}))
    return Base(str(starts_from(opened.config)), path, start.revision, parts, sha256, tokenizer.fingerprint, names)


def earlier_weights(config: FinetuneConfig) -> list[Weights]:
    """Those of the runs that the tuning method builds on. A checkpoint of the run itself has what was taken of them."""
    return [read(path, config.offline) for path in config.tuning.builds_on]
