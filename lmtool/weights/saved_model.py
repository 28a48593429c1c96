"""The model of a checkpoint: its configuration, its backbone and heads, their logits, and merging of tuned weights.

Shape letters: T tokens, N documents, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config import plugins
from lmtool.config.checkpoint import find, read_config
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.config.tables import Choice
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads
from lmtool.models.base import Backbone
from lmtool.models.configs import ModelConfig, Pooling, SequenceForm
from lmtool.models.heads.lm import ReplacedTokenHead, lm_head, masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Side, Tap
from lmtool.system.terminal import counted
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.configs.base import TuningConfig
from lmtool.types import Packed
from lmtool.weights.assemble import assemble
from lmtool.weights.folders import hf_folder
from lmtool.weights.reading import Weights, by_part
from lmtool.weights.task_heads import CLASSIFIER, DECISIONS, HEADS, WORDS, TaskHead, head_of_task

PAIR_HEADS = {"next_sentence": ("next", "random"), "sentence_order": ("in order", "swapped")}
"""Heads over text pairs, applied to the pooler's output, and the meaning of their two classes for the second text."""


class CheckpointModel(ModelWithHeads):
    """A backbone and its heads, named as in the checkpoint.

    Args:
        backbone: The backbone.
        tensors: The checkpoint's tensors, which determine the heads.
        task: The `task` section of a finetuned checkpoint, which determines the form of its head.
        seed: Of newly initialized parameters.

    Attributes:
        task: Name of the task's head, which scores texts or (`of_tokens`) tokens; None without one.
        pair: Name of the head for text pairs, or None.
        first_token: First id of the special tokens that the task's head adds, or None.
    """

    def __init__(
        self, backbone: Backbone, tensors: Mapping[str, Tensor], task: JsonMapping | None = None, seed: int = 0
    ):
        super().__init__(backbone, seed)
        parts = {
            part.removeprefix("heads."): head_tensors
            for part, head_tensors in by_part(tensors).items()
            if part.startswith("heads.")
        }
        if backbone.config.architecture != "encoder":
            parts.setdefault("lm", {})
        heads = {name: _head(backbone, name, head_tensors) for name, head_tensors in parts.items()}
        self.heads = nn.ModuleDict({name: head for name, head in heads.items() if head is not None})
        self.form = form_of(backbone.config, task or {})
        name = str((task or {}).get("name"))
        task_head = self._task_head(task)
        head_name, self.of_tokens = name if name in self.heads else task_head.name, task_head.tokens
        self.of_inputs = task_head.name == WORDS and backbone.config.token_states == "inputs"
        self.pooled = backbone.pooler_on_tokens if self.of_tokens else self.form.pooled
        complete = head_name in self.heads and (not self.pooled or "pooler" in self.heads)
        self.task = head_name if complete else None
        head = self.heads[head_name] if complete else None
        tokens = head.tokens if isinstance(head, SequenceHead) else None
        self.first_token = None if tokens is None else backbone.embed.extend(tokens)
        pairs = [name for name in PAIR_HEADS if name in self.heads and "pooler" in self.heads]
        self.pair = pairs[0] if pairs else None

    def _task_head(self, task: JsonMapping | None) -> TaskHead:
        """The task's kind of head; without a task, the kind of the first task head among the tensors."""
        task_head = None if task is None else head_of_task(task)
        return task_head or next((head for name, head in HEADS.items() if name in self.heads), HEADS[CLASSIFIER])

    @property
    def head_side(self) -> Side:
        return "inputs" if self.of_inputs else super().head_side

    def hidden(
        self,
        inputs: Packed,
        outputs: Packed | None = None,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """(T, H) input of the heads: encoder states if the task classifies tokens by these, otherwise the states of the
        last stack. See `ModelWithHeads.hidden` for the parameters."""
        return super().hidden(inputs, None if self.of_inputs else outputs, rng, read_M, tap)

    def logits(self, hidden_TH: Tensor, read: Packed) -> Tensor | None:
        """(N, C) for a task, (T, C) for a task that scores tokens; otherwise (T, V) for a language model, or (T,) for
        replaced token detection; None without such a head."""
        if self.task is not None and self.of_tokens:
            return self.heads[self.task](self.heads["pooler"](hidden_TH) if self.pooled else hidden_TH)
        if self.task is not None:
            return self._text_logits(self.task, hidden_TH, read, self.form.pooling)
        for name in ("masked_lm", "lm"):
            if name in self.heads:
                return self.heads[name](hidden_TH, self.backbone.embed.token.weight)
        return self.heads["replaced_token"](hidden_TH) if "replaced_token" in self.heads else None

    def pair_logits(self, hidden_TH: Tensor, read: Packed) -> Tensor | None:
        """(N, 2) logits of the head for text pairs: whether the second text is from another document, or precedes the
        first. None without such a head."""
        return None if self.pair is None else self._text_logits(self.pair, hidden_TH, read, "first")

    def _text_logits(self, head: str, hidden_TH: Tensor, read: Packed, pooling: Pooling) -> Tensor:
        """(N, C) logits of a head over texts, after the pooler if there is one."""
        summary_NH = summary(hidden_TH, read, pooling)
        if "pooler" in self.heads:
            summary_NH = self.heads["pooler"](summary_NH)
        return self.heads[head](summary_NH)


def _head(backbone: Backbone, name: str, head_tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """The module of a head, by name; None for a head that is only used in pretraining."""
    width, read = backbone.hidden_size, backbone.feature_size
    if name == "masked_lm":
        return masked_lm_head(backbone)
    if name == "lm" and backbone.config.architecture == "bidirectional_lm":
        return None  # it predicts from each direction separately
    if name == "lm":
        head = lm_head(backbone)
        trained = dict(head.named_parameters())
        # An untied head without an output matrix in the checkpoint is left out.
        return head if {f"heads.lm.{layer}" for layer in trained} <= set(head_tensors) else None
    if name == "pooler":
        return pooler(backbone)
    if name == "replaced_token":
        return ReplacedTokenHead(width, backbone.head_activation)
    weight, bias = f"heads.{name}.output.weight", f"heads.{name}.output.bias"
    dense = {f"heads.{name}.dense.weight", f"heads.{name}.dense.bias"} & set(head_tensors)
    tokens = f"heads.{name}.tokens.weight"
    decisions = [key for key in head_tensors if key.rpartition(".")[2] in DECISIONS]
    inputs = head_tensors[weight].shape[-1] if weight in head_tensors and head_tensors[weight].ndim == 2 else None
    if inputs not in (width, read) or not set(head_tensors) <= {weight, bias, tokens, *dense, *decisions}:
        return None
    new_tokens = len(head_tensors[tokens]) if tokens in head_tensors else 0
    linear = SequenceHead(inputs, len(head_tensors[weight]), 0.0, bias in head_tensors, bool(dense), new_tokens, width)
    for key in decisions:
        linear.register_buffer(key.rpartition(".")[2], head_tensors[key].clone())
    return linear


def form_of(model: ModelConfig, task: JsonMapping) -> SequenceForm:
    """The form of a task's head. `task` sections of older checkpoints may lack fields."""
    return model.sequence_form(task.get("head"), task.get("pooling"), task.get("head_layers"))


def format_of(model: ModelConfig, task: JsonMapping) -> str:
    """The text format of a `task` section. Token classification uses transformers' format."""
    head = head_of_task(task)
    scores_tokens = head is not None and head.name == WORDS and model.transformers_form is not None
    return (model.sequence_form("transformers") if scores_tokens else form_of(model, task)).text_format


@dataclass(frozen=True)
class SavedModel:
    """The `assemble` blueprint of a saved model. tensors: determine its heads. task: the `task` section of a finetuned
    checkpoint, with the form of its head."""

    model: ModelConfig
    tensors: Mapping[str, Tensor]
    task: JsonMapping | None
    tuned_by: TuningConfig | None
    seed: int
    exits: tuple[int, ...] = ()

    @property
    def learns(self) -> SavedModel:
        """The model itself: `learner` builds its heads."""
        return self

    def learner(self, backbone: Backbone, tokenizer: Tokenizer | None, seed: int) -> CheckpointModel:
        return CheckpointModel(backbone, self.tensors, self.task, seed)


def saved_model(checkpoint: str, saved: JsonMapping, tensors: Mapping[str, Tensor]) -> SavedModel:
    """The model of a saved configuration. UserError if it cannot be decoded."""
    task = saved.get("task")
    return SavedModel(
        section(checkpoint, saved, Choice("model")),
        tensors,
        task if isinstance(task, dict) else None,
        section(checkpoint, saved, Choice("tuning", optional=True)),
        saved.get("seed") or 0,
    )


def saved_config(checkpoint: str, offline: bool = False) -> JsonObject:
    """The configuration in a checkpoint, not decoded; it has at least a `model` section."""
    folder = hf_folder(checkpoint, offline)
    if folder is not None:
        return folder.saved_config()
    saved = read_config(find(checkpoint))
    missing = [plugin for plugin in saved.get("plugins") or () if plugin not in plugins.typed()]
    if missing:
        hint = f"if you trust it, load it first: lmtool.config.plugins.load({missing!r})"
        raise UserError(f"checkpoint={checkpoint} needs the plugin {missing[0]}, which is not loaded", hint)
    return saved


def section(checkpoint: str, saved: Mapping[str, object], choice: Choice) -> Any:
    """A component's section, decoded strictly. UserError if it is invalid."""
    try:
        return choice.validate(saved.get(choice.group))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([choice.group, *map(str, first["loc"])])
        raise UserError(f"checkpoint={checkpoint}: {where}: {first['msg']}", "use another checkpoint") from error


@dataclass(frozen=True)
class Folded:
    """A tuned checkpoint without tensors that are only needed for training. config: its configuration."""

    tensors: dict[str, Tensor]
    config: JsonObject


def merged(weights: Weights, saved: Mapping[str, object]) -> Weights:
    """Merge the tensors that the tuning method added into the model's weights. saved: the checkpoint's configuration.
    UserError if the method cannot be merged."""
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuned_by is None:
        return weights
    with torch.device("meta"):
        planned, _ = assemble(model, None)
    if not planned.added:
        _merge(planned, weights.origin)
        return weights
    parts, _ = assemble(model, None, trained=weights)
    # `CheckpointModel` lacks heads that are only used in pretraining.
    rest = {name: tensor for name, tensor in weights.tensors.items() if name not in parts.state_dict()}
    _merge(parts, weights.origin)
    tensors = {name: tensor.detach() for name, tensor in parts.state_dict().items()}
    unmerged = [name for name in tensors if name in planned.added]
    if unmerged:
        more = f" and {counted(len(unmerged) - 1, 'more tensor')}" if len(unmerged) > 1 else ""
        raise UserError(
            f"checkpoint={weights.origin}: {unmerged[0]}{more}, which its tuning method added, cannot be merged into "
            f"model={model.model.name}",
            "format=delta exports them separately from their base; start from that base, or from a run whose tuning "
            "method can be merged (tuning=lora)",
        )
    return replace(weights, tensors={**rest, **tensors}, merged=True)


def _merge(parts: ModelWithHeads, origin: str) -> None:
    assert parts.tuning is not None
    try:
        parts.tuning.merge(parts)
    except UserError as error:
        raise UserError(f"checkpoint={origin}: {error.message}", error.hint) from error


def folded(weights: Weights, checkpoint_tensors: Mapping[str, Tensor], saved: Mapping[str, object]) -> Folded | None:
    """Replace tensors that are only needed for training (a prefix encoder) by their result.

    Args:
        weights: The complete weights, including the base.
        checkpoint_tensors: The tensors that the tuned checkpoint stores itself.
        saved: The checkpoint's configuration.

    Returns:
        The checkpoint's new content; None if nothing changes.
    """
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuned_by is None:
        return None
    parts, _ = assemble(model, None, trained=weights)
    assert parts.tuning is not None
    before, config = parts.added, parts.tuning.fold(parts)
    if config == model.tuned_by:
        return None
    state = parts.state_dict()
    tensors = {name: tensor for name, tensor in checkpoint_tensors.items() if name not in before}
    tensors |= {name: state[name] for name in sorted(parts.added)}
    return Folded(tensors, {**saved, "tuning": config.model_dump(mode="json")})
