"""The heads in a checkpoint, on a backbone of its family, and their logits.

Shape letters: T tokens, N documents, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.saved import JsonMapping
from lmtool.learners.model import ModelWithHeads
from lmtool.models.base import Backbone
from lmtool.models.configs import ModelConfig, Place, SequenceForm
from lmtool.models.heads.lm import ReplacedTokenHead, lm_head, masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.stack import Side, Tap
from lmtool.types import Packed
from lmtool.weights.loading import by_part
from lmtool.weights.task_heads import CLASSIFIER, DECISIONS, HEADS, WORDS, TaskHead, head_of_task

PAIR_HEADS = {"next_sentence": ("next", "random"), "sentence_order": ("in order", "swapped")}
"""Heads over the two texts of a pair, behind the pooler, and what their two classes say of the second text."""


class CheckpointModel(ModelWithHeads):
    """A backbone and its heads, named as in the checkpoint. task: the head with logits for a whole text, or for its
    tokens (`of_tokens`), or None. pair: the head for pairs, or None.

    task (of the constructor): section of the task that the checkpoint was trained for, with the form of its head.
    """

    def __init__(
        self, backbone: Backbone, tensors: Mapping[str, Tensor], task: JsonMapping | None = None, seed: int = 0
    ):
        super().__init__(backbone, seed)
        parts = {
            part.removeprefix("heads."): parts_tensors
            for part, parts_tensors in by_part(tensors).items()
            if part[:6] == "heads."
        }
        if backbone.config.architecture != "encoder":
            parts.setdefault("lm", {})
        heads = {name: _head(backbone, name, parts_tensors) for name, parts_tensors in parts.items()}
        self.heads = nn.ModuleDict({name: head for name, head in heads.items() if head is not None})
        self.form = form_of(backbone.config, task or {})
        name = str((task or {}).get("name"))
        task_head = self._task_head(task)
        head_name, self.of_tokens = name if name in self.heads else task_head.name, task_head.tokens
        self.of_inputs = task_head.name == WORDS and backbone.config.token_states == "inputs"
        self.pooled = backbone.pooler_on_tokens if self.of_tokens else self.form.pooled
        complete = head_name in self.heads and (not self.pooled or "pooler" in self.heads)
        self.task = head_name if complete else None
        # The special tokens that the task's head adds have ids from here on.
        head = self.heads[head_name] if complete else None
        tokens = head.tokens if isinstance(head, SequenceHead) else None
        self.first_token = None if tokens is None else backbone.embed.extend(tokens)
        pairs = [name for name in PAIR_HEADS if name in self.heads and "pooler" in self.heads]
        self.pair = pairs[0] if pairs else None

    def _task_head(self, task: JsonMapping | None) -> TaskHead:
        """The head type of the task; without a task, of the first known head in the tensors."""
        known = None if task is None else head_of_task(task)
        return known or next((head for name, head in HEADS.items() if name in self.heads), HEADS[CLASSIFIER])

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
        """The heads' input; encoder states if the task's words are represented by those."""
        return super().hidden(inputs, None if self.of_inputs else outputs, rng, read_M, tap)

    def logits(self, hidden_TH: Tensor, read: Packed) -> Tensor | None:
        """(N, C) for a task, (T, C) for a task that scores tokens; otherwise (T, V) for a language model, or (T,) for
        replaced tokens; None without such a head."""
        if self.task is not None and self.of_tokens:
            return self.heads[self.task](self.heads["pooler"](hidden_TH) if self.pooled else hidden_TH)
        if self.task is not None:
            return self._of_texts(self.task, hidden_TH, read, self.form.place)
        for name in ("masked_lm", "lm"):
            if name in self.heads:
                return self.heads[name](hidden_TH, self.backbone.embed.token.weight)
        return self.heads["replaced_token"](hidden_TH) if "replaced_token" in self.heads else None

    def pair_logits(self, hidden_TH: Tensor, read: Packed) -> Tensor | None:
        """(N, 2) of the head for pairs: whether the second text is from another document, or precedes the first."""
        return None if self.pair is None else self._of_texts(self.pair, hidden_TH, read, "first")

    def _of_texts(self, head: str, hidden_TH: Tensor, read: Packed, place: Place) -> Tensor:
        """(N, C) of a head over whole texts, after the pooler if there is one."""
        summary_NH = summary(hidden_TH, read, place)
        if "pooler" in self.heads:
            summary_NH = self.heads["pooler"](summary_NH)
        return self.heads[head](summary_NH)


def _head(backbone: Backbone, name: str, head_tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """The module of a head, by name; None for one that is only used in its training."""
    width, read = backbone.hidden_size, backbone.feature_size
    if name == "masked_lm":
        return masked_lm_head(backbone)
    if name == "lm" and backbone.config.architecture == "bidirectional_lm":
        return None  # it predicts from each side apart
    if name == "lm":
        head = lm_head(backbone)
        trained = dict(head.named_parameters())
        # An untied head without a table in the checkpoint is left out.
        return head if {f"heads.lm.{layer}" for layer in trained} <= set(head_tensors) else None
    if name == "pooler":
        return pooler(backbone)
    if name == "replaced_token":
        return ReplacedTokenHead(width, backbone.head_activation)
    weight, bias = f"heads.{name}.output.weight", f"heads.{name}.output.bias"
    dense = {f"heads.{name}.dense.weight", f"heads.{name}.dense.bias"} & set(head_tensors)
    tokens = head_tensors.get(f"heads.{name}.tokens.weight")
    decisions = {
        key.rpartition(".")[2]: head_tensors[key] for key in head_tensors if key.rpartition(".")[2] in DECISIONS
    }
    head_tensors = {
        key: head_tensors[key]
        for key in head_tensors
        if key.rpartition(".")[2] not in DECISIONS and head_tensors[key] is not tokens
    }
    inputs = head_tensors[weight].shape[-1] if weight in head_tensors and head_tensors[weight].ndim == 2 else None
    if inputs in (width, read) and set(head_tensors) - dense <= {weight, bias}:
        brought = 0 if tokens is None else len(tokens)
        linear = SequenceHead(inputs, len(head_tensors[weight]), 0.0, bias in head_tensors, bool(dense), brought, width)
        for key, tensor in decisions.items():
            linear.register_buffer(key, tensor.clone())
        return linear
    return None


def form_of(model: ModelConfig, task: JsonMapping) -> SequenceForm:
    """How a task's head reads a text. Sections of older checkpoints may lack fields."""
    return model.sequence_form(task.get("head"), task.get("pooling"), task.get("head_layers"))


def format_of(model: ModelConfig, task: JsonMapping) -> str:
    """The text format of a task's section. Words are formatted as in transformers."""
    head = head_of_task(task)
    over_words = head is not None and head.name == WORDS and model.transformers_form is not None
    return (model.sequence_form("transformers") if over_words else form_of(model, task)).text_format
