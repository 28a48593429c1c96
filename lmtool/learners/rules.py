"""The rules of objectives and tasks: the models and vocabularies that they work with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import get_args

from lmtool.config.base import JsonObject
from lmtool.data.configs import FORMATS, DataConfig
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, ObjectiveConfig, missing_token
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.tokenizers.configs import TokenizerConfig


def format_roles(model: ModelConfig, text_format: str | None = None) -> tuple[str, ...]:
    """Returns the special tokens that the model adds to its texts. text_format: the name of a format that replaces the
    model's own."""
    definition = FORMATS.get(text_format or model.text_format)
    roles = definition.roles if definition is not None else ()
    return (*roles, *([model.start_role] if model.start_role else []))


def reads_lanes(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> bool:
    """Whether a run reads its text as parallel streams along which state is carried (`data/loader.py`)."""
    return bool(model.carries_state and objective.reads_lanes and data.name != "mixture" and data.documents == "joined")


def _members(learned: LearnedConfig) -> Iterator[LearnedConfig]:
    yield from (member for member in learned.member_configs() if member is not learned)


def _in_mixture(mixture: LearnedConfig, problem: Problem, hint: str | None = None) -> Problem:
    key = f"{mixture.group}.members"
    return Problem(key, f"{key}: {problem.message}", hint or problem.hint)


def refuse_conflicts(learned: LearnedConfig) -> Iterator[Problem]:
    """No value of an objective, of a task or of a member contradicts another one, or has no effect."""
    yield from learned.conflicts(learned.group)
    for member in _members(learned):
        for problem in member.conflicts(f"{learned.group}.with.{member.title}"):
            yield _in_mixture(learned, problem)


def require_trainable_model(learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
    """An objective or a task, and each member of a mixture, can train the model."""
    yield from islice(learned.conflicts_with_model(model, learned.group), 1)
    for member in _members(learned):
        for problem in islice(member.conflicts_with_model(model, f"{learned.group}.with.{member.title}"), 1):
            if isinstance(learned, ObjectiveConfig):
                yield _in_mixture(learned, problem, "set objective=auto")
                return
            yield _in_mixture(learned, problem)


def refuse_fsdp(learned: LearnedConfig, parallel: str) -> Iterator[Problem]:
    """An objective or a task works with sharded weights, if parallel=fsdp shards them."""
    if parallel == "fsdp":
        yield from islice(learned.conflicts_with_fsdp(), 1)
        for member in _members(learned):
            for problem in islice(member.conflicts_with_fsdp(), 1):
                yield _in_mixture(learned, problem)


def require_tokens_of_text_format(model: ModelConfig, tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """The vocabulary has the special tokens of the model's text format."""
    missing = None if tokenizer.roles is None else missing_token(format_roles(model), tokenizer.roles)
    if missing is not None:
        message = f"tokenizer={tokenizer.name} has no {missing}, which model={model.name} adds to its texts"
        yield Problem("tokenizer", message, "set tokenizer=auto")


def require_tokens_of_objective(
    objective: ObjectiveConfig, model: ModelConfig, tokenizer: TokenizerConfig
) -> Iterator[Problem]:
    """The vocabulary has the special tokens that the objective inserts."""
    roles = tokenizer.roles
    if roles is None or missing_token(format_roles(model), roles) is not None:
        return  # reported by require_tokens_of_text_format
    for member in objective.member_configs():
        missing = missing_token(member.roles, roles)
        if missing is not None and next(member.conflicts_with_model(model, "objective"), None) is None:
            message = f"tokenizer={tokenizer.name} has no {missing}, which objective={member.name} needs"
            kind = _special_tokens_with((*format_roles(model), *member.roles), tokenizer)
            hint = "set objective=auto tokenizer=auto" if kind is None else f"set tokenizer.special_tokens={kind}"
            problem = Problem("objective", message, hint)
            yield problem if member is objective else _in_mixture(objective, problem)
            return


def _special_tokens_with(roles: Iterable[str | tuple[str, ...]], tokenizer: TokenizerConfig) -> str | None:
    field = type(tokenizer).model_fields.get("special_tokens")
    kinds = () if field is None else get_args(field.annotation)
    by_kind = {kind: tokenizer.model_copy(update={"special_tokens": kind}).roles or () for kind in kinds}
    needed = tuple(roles)
    return next((kind for kind, known in by_kind.items() if missing_token(needed, known) is None), None)


def require_reuse_for_memory(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> Iterator[Problem]:
    """XLNet's memory holds the states of reused tokens, so it stays empty with objective.reuse=0."""
    if objective.reuses_nothing and objective.first_conflict(model) is None and reads_lanes(model, objective, data):
        yield Problem(
            "model.memory_length",
            f"model.memory_length={model.max_memory_length} caches the states of reused tokens, but objective.reuse=0",
            "set objective.reuse=256 for windows of 512, or model.memory_length=0",
        )


def require_one_text(objective: ObjectiveConfig, data: DataConfig) -> Iterator[Problem]:
    """Statistics of a whole text are not mixed with those of another text."""
    for member in objective.member_configs():
        if member.counts_one_text and data.name == "mixture":
            message = f"objective={member.name} counts words in one text, but data=mixture has several"
            yield Problem("data", message, "set data=text data.path=[FOLDER,FOLDER] to read several as one text")
            return


def require_steps_after_generator(objective: ObjectiveConfig, max_steps: int | None) -> Iterator[Problem]:
    """If the generator is trained alone first, steps for the model must remain."""
    generator_steps = objective.steps_without_model
    if generator_steps and max_steps is not None and generator_steps >= max_steps:
        yield Problem(
            "objective.generator_steps",
            f"objective.generator_steps={generator_steps} leaves the model no step of max_steps={max_steps}",
            f"set objective.generator_steps={max(1, max_steps // 2)} or max_steps={2 * generator_steps}",
        )


def require_trees(learned: LearnedConfig, model: ModelConfig) -> Iterator[Problem]:
    """Positions in a tree need an encoder and a task whose rows have trees, and trees need such positions."""
    positions = model.positions if isinstance(model, TransformerConfig) else None
    reads = positions is not None and positions.reads_trees
    has = [member.reads_trees for member in learned.member_configs()]
    if not reads or positions is None:
        if any(has):
            message = "task.heads is read only by positions in a tree"
            yield Problem(
                "task.heads", message, "set model/positions=tree_distance checkpoint=none, or task.heads=null"
            )
        return
    subject = f"model/positions={positions.name}"
    if model.architecture != "encoder":
        message = f"{subject} reads the tree of a whole text; model={model.name} is not an encoder"
        yield Problem("model.positions", message, "set model=bert, or other positions: model/positions=learned")
    elif isinstance(learned, ObjectiveConfig):
        message = f"{subject} reads dependency trees, and text to pretrain on has none"
        yield Problem("model.positions", message, "set model/positions=learned, or use lmtool finetune task=ud_ewt")
    elif len(has) > 1 or not all(has):
        message = f"{subject} reads dependency trees; {learned.group}={learned.name} has none"
        hint = "set task.heads=COLUMN in a task that tags words or reads a text or a pair; or model/positions=learned"
        yield Problem("task.heads", message, hint)


def _counts_words(max_words: int | None, checkpoint_at: Sequence[int | str] | None) -> str | None:
    if max_words is not None:
        return f"max_words={max_words}"
    words = [str(amount) for amount in checkpoint_at or () if str(amount).endswith("w")]
    return f"checkpoint_at={words[0]}" if words else None


def refuse_words_of_rows(max_words: int | None, checkpoint_at: Sequence[int | str] | None) -> Iterator[Problem]:
    if setting := _counts_words(max_words, checkpoint_at):
        message = f"{setting}: the words of labeled rows are not counted"
        yield Problem(setting.partition("=")[0], message, "use max_tokens= or max_epochs=, and amounts of tokens")


def require_words_of_one_text(
    max_words: int | None,
    checkpoint_at: Sequence[int | str] | None,
    phases: Sequence[JsonObject],
    data: DataConfig,
    objective: ObjectiveConfig,
) -> Iterator[Problem]:
    setting = _counts_words(max_words, checkpoint_at)
    reason = "phases=" if phases else f"data={data.name}" if data.name == "mixture" else None
    if not objective.reads_text:
        reason = f"objective={objective.name}"
    if setting and reason:
        message = f"{setting}: words are counted in passes over one text, not with {reason}"
        yield Problem(setting.partition("=")[0], message, "use max_tokens=, and amounts of tokens")
