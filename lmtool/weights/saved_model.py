"""Rebuilds the model of a checkpoint: reads its configuration, builds backbone and heads, computes logits, and merges
tuned weights.

Shape letters: T tokens, N documents, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config import registry
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import Choice
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads
from lmtool.models.base import Backbone
from lmtool.models.configs import ModelConfig, Pooling, SequenceForm
from lmtool.models.heads.lm import ReplacedTokenHead, lm_head, masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, SpanHead, pooler, summary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Side, Tap
from lmtool.runs.finding import find, read_config
from lmtool.system.terminal import counted
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.configs.base import TuningConfig
from lmtool.types import Packed
from lmtool.weights.assemble import assemble
from lmtool.weights.folders import hf_folder
from lmtool.weights.reading import Weights, group_by_part
from lmtool.weights.task_heads import CLASSIFIER, DECISIONS, HEADS, TOKEN_CLASSIFIER, TaskHead, head_of_task

PAIR_HEADS = {"next_sentence": ("next", "random"), "sentence_order": ("in order", "swapped")}
"""Heads that classify text pairs from the pooler's output, each with the names of its two classes. The classes say
whether the second text follows the first or is random, or whether the two texts are in order or swapped."""


class CheckpointModel(ModelWithHeads):
    """A backbone and its heads, named as in the checkpoint.

    Args:
        tensors: The checkpoint's tensors. Their names and shapes determine which heads are built.
        task: The `task` section of a finetuned checkpoint, which determines the architecture of the task's head.

    Attributes:
        sequence_form: The architecture of the task's head: pooling, hidden layers and text format.
        task: Name of the task's head; None if the checkpoint has no complete head of a task, or one that reads spans.
        scores_tokens: Whether the task's head scores every token, and not whole texts.
        reads_inputs: Whether the task's head reads the encoder's states in an encoder-decoder.
        applies_pooler: Whether the pooler is applied before the task's head.
        pair_head: Name of the head that classifies text pairs, or None.
        first_token: First id of the special tokens that the task's head adds to the vocabulary, or None.
    """

    def __init__(
        self, backbone: Backbone, tensors: Mapping[str, Tensor], task: JsonMapping | None = None, seed: int = 0
    ):
        super().__init__(backbone, seed)
        parts = {
            part.removeprefix("heads."): head_tensors
            for part, head_tensors in group_by_part(tensors).items()
            if part.startswith("heads.")
        }
        if backbone.config.architecture != "encoder":
            parts.setdefault("lm", {})
        heads = {name: _head(backbone, name, head_tensors) for name, head_tensors in parts.items()}
        self.heads = nn.ModuleDict({name: head for name, head in heads.items() if head is not None})
        self.sequence_form = sequence_form_of(backbone.config, task or {})
        name = str((task or {}).get("name"))
        task_head = self._task_head(task)
        head_name, self.scores_tokens = name if name in self.heads else task_head.name, task_head.scores_tokens
        self.reads_inputs = task_head.name == TOKEN_CLASSIFIER and backbone.config.token_states == "inputs"
        self.applies_pooler = backbone.pooler_on_tokens if self.scores_tokens else self.sequence_form.pooled
        has_heads = head_name in self.heads and (not self.applies_pooler or "pooler" in self.heads)
        # Logits need the spans, which only the task's examples have.
        has_heads = has_heads and not isinstance(self.heads[head_name], SpanHead)
        self.task = head_name if has_heads else None
        head = self.heads[head_name] if has_heads else None
        new_tokens = head.tokens if isinstance(head, SequenceHead) else None
        self.first_token = None if new_tokens is None else backbone.embed.extend(new_tokens)
        reads_pair = len((task or {}).get("text", ())) == 2 and self.sequence_form.text_format == "gpt1"
        self.reads_both_orders = reads_pair and bool((task or {}).get("symmetric"))
        pairs = [name for name in PAIR_HEADS if name in self.heads and "pooler" in self.heads]
        self.pair_head = pairs[0] if pairs else None

    def _task_head(self, task: JsonMapping | None) -> TaskHead:
        """Without a `task` section, the first kind in `HEADS` that the checkpoint has, or else a classifier."""
        task_head = None if task is None else head_of_task(task)
        return task_head or next((head for name, head in HEADS.items() if name in self.heads), HEADS[CLASSIFIER])

    @property
    def head_side(self) -> Side:
        return "inputs" if self.reads_inputs else super().head_side

    def hidden(
        self,
        inputs: Packed,
        outputs: Packed | None = None,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Returns (T, H): the states of the encoder if the task classifies its tokens, otherwise those of the last
        stack."""
        return super().hidden(inputs, None if self.reads_inputs else outputs, rng, read_M, tap)

    def logits(self, hidden_TH: Tensor, packed: Packed) -> Tensor | None:
        """Returns the logits of the checkpoint's main head, or None without such a head. hidden_TH: the hidden states
        that the heads read. packed: the tokens of these hidden states. Returns (N, C) for a task that scores texts, (T,
        C) for a task that scores tokens. Without a task: (T, V) for a language model, (T,) for replaced token
        detection."""
        if self.task is not None and self.scores_tokens:
            return self.heads[self.task](self.heads["pooler"](hidden_TH) if self.applies_pooler else hidden_TH)
        if self.task is not None and self.reads_both_orders:
            raise UserError(
                f"the head {self.task} reads both orders of two texts, but this input has one",
                "use lmtool predict, or predict(texts, pairs) of the loaded model",
            )
        if self.task is not None:
            return self._text_logits(self.task, hidden_TH, packed, self.sequence_form.pooling)
        for name in ("masked_lm", "lm"):
            if name in self.heads:
                return self.heads[name](hidden_TH, self.backbone.embed.token.weight)
        return self.heads["replaced_token"](hidden_TH) if "replaced_token" in self.heads else None

    def pair_logits(self, hidden_TH: Tensor, packed: Packed) -> Tensor | None:
        """Returns the logits of the head that classifies text pairs, (N, 2), or None without such a head. `PAIR_HEADS`
        names the two classes."""
        return None if self.pair_head is None else self._text_logits(self.pair_head, hidden_TH, packed, "first")

    def _text_logits(self, head: str, hidden_TH: Tensor, packed: Packed, pooling: Pooling) -> Tensor:
        summary_NH = summary(hidden_TH, packed, pooling)
        if "pooler" in self.heads:
            summary_NH = self.heads["pooler"](summary_NH)
        return self.heads[head](summary_NH)


def _head(backbone: Backbone, name: str, head_tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """Returns None for a head that only pretraining uses, or that has unknown tensors."""
    width, feature_size = backbone.hidden_size, backbone.feature_size
    if name == "masked_lm":
        return masked_lm_head(backbone)
    if name == "lm" and backbone.config.architecture == "bidirectional_lm":
        return None  # the two directions predict separately, so there are no logits for the whole text
    if name == "lm":
        head = lm_head(backbone)
        parameters = dict(head.named_parameters())
        # An untied head is left out if the checkpoint does not have its output matrix.
        return head if {f"heads.lm.{parameter}" for parameter in parameters} <= set(head_tensors) else None
    if name == "pooler":
        return pooler(backbone)
    if name == "replaced_token":
        return ReplacedTokenHead(width, backbone.head_activation)
    weight, bias = f"heads.{name}.output.weight", f"heads.{name}.output.bias"
    dense = {f"heads.{name}.dense.weight", f"heads.{name}.dense.bias"} & set(head_tensors)
    tokens = f"heads.{name}.tokens.weight"
    decisions = [key for key in head_tensors if key.rpartition(".")[2] in DECISIONS]
    inputs = head_tensors[weight].shape[-1] if weight in head_tensors and head_tensors[weight].ndim == 2 else None
    if inputs not in (width, feature_size) or not set(head_tensors) <= {weight, bias, tokens, *dense, *decisions}:
        return None
    spans = head_tensors[f"heads.{name}.dense.weight"].shape[-1] // (3 * inputs) if len(dense) == 2 else 0
    if spans:
        return SpanHead(inputs, spans, len(head_tensors[weight]))
    new_tokens = len(head_tensors[tokens]) if tokens in head_tensors else 0
    linear = SequenceHead(inputs, len(head_tensors[weight]), 0.0, bias in head_tensors, bool(dense), new_tokens, width)
    for key in decisions:
        linear.register_buffer(key.rpartition(".")[2], head_tensors[key].clone())
    return linear


def sequence_form_of(model: ModelConfig, task: JsonMapping) -> SequenceForm:
    """Returns the architecture of the head for a `task` section, in which fields may be missing (older checkpoints)."""
    return model.sequence_form(task.get("head"), task.get("pooling"), task.get("head_layers"))


def task_text_format(model: ModelConfig, task: JsonMapping) -> str:
    """Returns the name of the format in which a task's texts are read. Token classification always uses the format of
    transformers, if the family exists there."""
    head = head_of_task(task)
    scores_tokens = head is not None and head.name == TOKEN_CLASSIFIER and model.transformers_form is not None
    return (model.sequence_form("transformers") if scores_tokens else sequence_form_of(model, task)).text_format


@dataclass(frozen=True)
class SavedModel:
    """The blueprint from which `assemble` builds the model of a checkpoint. tensors: those of the checkpoint, which
    determine its heads. task: the `task` section of a finetuned checkpoint, or None. tuning_config: the `tuning`
    section, or None. exits: layers with early exits."""

    model: ModelConfig
    tensors: Mapping[str, Tensor]
    task: JsonMapping | None
    tuning_config: TuningConfig | None
    seed: int
    exits: tuple[int, ...] = ()

    @property
    def learner_config(self) -> SavedModel:
        """The builder of the learner, which is this object."""
        return self

    def learner(self, backbone: Backbone, tokenizer: Tokenizer | None, seed: int) -> CheckpointModel:
        return CheckpointModel(backbone, self.tensors, self.task, seed)


def saved_model(checkpoint: str, saved: JsonMapping, tensors: Mapping[str, Tensor]) -> SavedModel:
    """Returns the blueprint of a checkpoint's model. Raises UserError if its configuration cannot be decoded."""
    task = saved.get("task")
    return SavedModel(
        decode_section(checkpoint, saved, Choice("model")),
        tensors,
        task if isinstance(task, dict) else None,
        decode_section(checkpoint, saved, Choice("tuning", optional=True)),
        saved.get("seed") or 0,
    )


def saved_config(checkpoint: str, offline: bool = False) -> JsonObject:
    """Returns the configuration of a checkpoint as plain JSON data, with at least a `model` section. Raises UserError
    if a plugin of the checkpoint is not loaded."""
    folder = hf_folder(checkpoint, offline)
    if folder is not None:
        return folder.saved_config()
    saved = read_config(find(checkpoint))
    missing = [plugin for plugin in saved.get("plugins") or () if plugin not in registry.typed_plugins()]
    if missing:
        hint = f"if you trust the plugin, load it first: lmtool.config.registry.load({missing!r})"
        raise UserError(f"checkpoint={checkpoint} needs the plugin {missing[0]}, which is not loaded", hint)
    return saved


def decode_section(checkpoint: str, saved: Mapping[str, object], choice: Choice) -> Any:
    """Decodes the section of one component strictly. Raises UserError if the section is invalid."""
    try:
        return choice.validate(saved.get(choice.group))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([choice.group, *map(str, first["loc"])])
        raise UserError(f"checkpoint={checkpoint}: {path}: {first['msg']}", "use another checkpoint") from error


def merge_tuned(weights: Weights, saved: Mapping[str, object]) -> Weights:
    """Merges the tensors that a tuning method added into the model's weights. weights: the complete weights of a
    checkpoint, tuned or not. saved: the checkpoint's configuration. Returns the merged weights; the same object if
    there is nothing to merge. Raises UserError if the weights of the tuning method cannot be merged."""
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuning_config is None:
        return weights
    with torch.device("meta"):
        planned, _ = assemble(model, None)
    if not planned.added_names:
        # There is nothing to merge, but the method may still raise an error.
        _merge(planned, weights.origin)
        return weights
    parts, _ = assemble(model, None, trained=weights)
    # Tensors outside of the `CheckpointModel`, such as heads that only pretraining uses, are kept as they are.
    unread_tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in parts.state_dict()}
    _merge(parts, weights.origin)
    tensors = {name: tensor.detach() for name, tensor in parts.state_dict().items()}
    unmerged = [name for name in tensors if name in planned.added_names]
    if unmerged:
        others = f" and {counted(len(unmerged) - 1, 'more tensor')}" if len(unmerged) > 1 else ""
        raise UserError(
            f"checkpoint={weights.origin}: the tuning method added {unmerged[0]}{others}, which cannot be merged into "
            f"model={model.model.name}",
            "use format=delta to export only the added tensors, or set checkpoint= to the base model or to a run "
            "whose tuning method can be merged (tuning=lora)",
        )
    return replace(weights, tensors={**unread_tensors, **tensors}, merged=True)


def _merge(parts: ModelWithHeads, origin: str) -> None:
    assert parts.tuning is not None
    try:
        parts.tuning.merge(parts)
    except UserError as error:
        raise UserError(f"checkpoint={origin}: {error.message}", error.hint) from error


def fold_checkpoint(
    weights: Weights, checkpoint_tensors: Mapping[str, Tensor], saved: Mapping[str, object]
) -> tuple[dict[str, Tensor], JsonObject] | None:
    """Replaces modules that only training needs, such as the encoder of a prefix, by what they compute. Returns the new
    tensors and configuration of a tuned checkpoint; None if there is nothing to replace. checkpoint_tensors: the
    tensors that it stores itself; `weights` includes those of its base."""
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuning_config is None:
        return None
    parts, _ = assemble(model, None, trained=weights)
    assert parts.tuning is not None
    added_before, config = parts.added_names, parts.tuning.fold(parts)
    if config == model.tuning_config:
        return None
    state = parts.state_dict()
    tensors = {name: tensor for name, tensor in checkpoint_tensors.items() if name not in added_before}
    tensors |= {name: state[name] for name in sorted(parts.added_names)}
    return tensors, {**saved, "tuning": config.model_dump(mode="json")}
