"""What a run starts from: the tokenizer, the weights, the labels of its tasks."""

from __future__ import annotations

from dataclasses import replace

from lmtool.commands.configs import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.commands.fitting import lacks_around, lacks_tokens
from lmtool.commands.opening import OpenRun
from lmtool.config.checkpoint import find
from lmtool.errors import UserError
from lmtool.tasks.labels import TakenHead
from lmtool.tasks.loading import TaskData
from lmtool.tasks.members import read_tasks
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.folders import published_folder, tokenizer_folder
from lmtool.weights.reading import Weights, read


def saved_tokenizer(opened: OpenRun) -> Tokenizer | None:
    """The tokenizer this run must use: of its own checkpoint, else of the one it starts from; else None."""
    if opened.checkpoint is not None:
        return Tokenizer.load(opened.checkpoint, opened.config.tokenizer.parse_special_tokens)
    return starting_tokenizer(opened.config)


def starting_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the checkpoint the weights start from, or else of the hub; None where neither is named."""
    origin = starts_from(config)
    if origin is None:
        return hub_tokenizer(config.tokenizer, config.offline)
    published = published_folder(origin, config.offline)
    folder = find(origin) if published is None else published.path
    return Tokenizer.load(folder, config.tokenizer.parse_special_tokens)


def hub_tokenizer(config: TokenizerConfig, offline: bool) -> Tokenizer | None:
    """The tokenizer of a `tokenizer.path=hf://...`; None for any other."""
    if not isinstance(config, FolderConfig) or "://" not in config.path:
        return None
    return Tokenizer.load(tokenizer_folder(config.path, offline), config.parse_special_tokens)


def starts_from(config: RunConfig) -> str | None:
    """The checkpoint the weights start from; None for random ones."""
    return None if config.checkpoint in (None, "none") else config.checkpoint


def with_tasks(config: PretrainConfig) -> tuple[PretrainConfig, dict[str, TaskData]]:
    """The configuration with the labels of the tasks among its objectives as found, for a checkpoint must know their
    names; and these tasks' data."""
    objective, read = read_tasks(config.objective, config.seed, config.cache_dir, config.offline)
    return config.model_copy(update={"objective": objective}), read


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
    layout = config.task.text_format(model) if isinstance(config, FinetuneConfig) else None
    for problem in (lacks_around(model, roles, layout), *(lacks_tokens(part, roles) for part in parts)):
        if problem is not None:
            have = ", ".join(sorted(roles)) or "none"
            raise UserError(
                f"the tokenizer {problem}; its special tokens are: {have}",
                "take a tokenizer that fits (tokenizer=auto, with checkpoint=none), or another objective",
            )


def start_weights(config: RunConfig, taken: TakenHead | None = None, resumes: bool = False) -> Weights | None:
    """The weights the run starts from. taken: the head of its task in them. resumes: from a checkpoint of its own, so
    that they may be gone. None where they are random, or gone."""
    origin = starts_from(config)
    if origin is None:
        return None
    try:
        weights = read(origin, config.offline)
    except UserError:
        if not resumes:
            raise
        return None
    if taken is not None and isinstance(config, FinetuneConfig):
        weights = replace(weights, tensors=taken.tensors(weights.tensors, config.task.name))
    return weights
