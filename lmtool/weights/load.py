"""`lmtool.load`: a checkpoint as a model over plain padded tensors, with its tokenizer.

Shape letters: B rows, L their padded length, T real tokens, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lmtool.config import plugins
from lmtool.config.base import Config
from lmtool.config.checkpoint import find, read_config
from lmtool.config.tables import Choice, register
from lmtool.data.configs import FORMATS
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.writing import writer_of
from lmtool.models.base import Backbone
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder import shifted
from lmtool.models.heads.lm import LMHead
from lmtool.tokenizers.published import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed
from lmtool.weights.assemble import assemble
from lmtool.weights.folders import published_folder
from lmtool.weights.heads import CheckpointModel
from lmtool.weights.loading import LoadReport
from lmtool.weights.reading import read
from lmtool.weights.unread import unread_layout

register("lmtool.models")
register("lmtool.tuning")


@dataclass(frozen=True)
class ModelOutput:
    """hidden: (B, L, H) of the last layer, zero where there is padding; of the decoder's where there are two stacks.
    logits: (B, L, V) of a language model, (B, L) of replaced tokens, (B, C) of a task's head, (B, L, C) of one that
    scores tokens, or None.
    pair_logits: (B, 2) of a head over pairs: the second text follows, or it is another document's (next sentence) or
    comes first (sentence order); None without one."""

    hidden: Tensor
    logits: Tensor | None
    pair_logits: Tensor | None = None


@dataclass(frozen=True)
class Loaded:
    """model: in evaluation mode. tokenizer: as in training; None where the checkpoint has none. config: of the model.
    report: which parts of the checkpoint were taken. saved: its configuration as it stands there."""

    model: PaddedModel
    tokenizer: Tokenizer | None
    config: ModelConfig
    report: LoadReport
    saved: Mapping[str, Any]

    @property
    def task(self) -> Mapping[str, Any] | None:
        """The section of the task that it was trained for, if one."""
        task = self.saved.get("task")
        return task if isinstance(task, dict) else None

    def generate(self, prompts: Sequence[str], seed: int = 0, **settings: Any) -> list[str]:
        """What the model writes to each prompt: a decoder's continuation, an encoder-decoder's answer. settings: fields
        of `GenerationConfig` (max_new_tokens, temperature, beams, ...). UserError where it writes no text."""
        head = dict(self.model.parts.heads.items()).get("lm")
        if self.tokenizer is None or not isinstance(head, LMHead):
            missing = "tokenizer" if self.tokenizer is None else "head that writes text"
            raise UserError(f"the checkpoint has no {missing}", "give one that a language model was trained in")
        writer = writer_of(self.model.parts.backbone, head, self.tokenizer, self.task)
        ids = writer.prompts(prompts, [("prompts", number) for number in range(len(prompts))])
        config = GenerationConfig(**settings).with_published(self.saved.get("generation", {}))
        new = writer.write(ids, config, seed)
        return [writer.text(*pair) for pair in zip(ids, new, strict=True)]


class PaddedModel(nn.Module):
    """A backbone and heads that read padded rows. Inside, the real tokens are packed end to end. start: the token that
    a decoder's text starts with, where it is known."""

    def __init__(self, parts: CheckpointModel, start: int | None = None):
        super().__init__()
        self.parts, self.start = parts, start

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ModelOutput:
        """input_ids: (B, L) int64. attention_mask: (B, L), not zero where a token is real; None: everywhere. The real
        tokens of a row stand together; their positions count from the first of them. decoder_input_ids: (B, L') of an
        encoder-decoder, shifted already, all real; None for a task's head: its decoder reads the same text.
        token_type_ids: (B, L), 1 at the second text of a pair; None: 0 everywhere. ValueError where a shape is wrong,
        and for segments that the model does not have."""
        two_stacks = self.parts.backbone.config.architecture == "encoder_decoder"
        own = two_stacks and self.parts.task is not None and self.start is not None
        if two_stacks != (decoder_input_ids is not None) and not own:
            raise ValueError(f"decoder_input_ids are {'missing' if two_stacks else 'for an encoder-decoder only'}")
        real_BL = _real(input_ids, attention_mask)
        inputs = _packed(input_ids, real_BL, self._segments(input_ids, token_type_ids))
        outputs = None
        if decoder_input_ids is not None:
            real_BL = _real(decoder_input_ids, None)
            outputs = _packed(decoder_input_ids, real_BL)
        elif two_stacks and self.start is not None:
            outputs = shifted(inputs, self.start)
        hidden_TH = self.parts.hidden(inputs, outputs)
        read = inputs if outputs is None else outputs
        logits = self.parts.logits(hidden_TH, read)
        if logits is not None and (self.parts.task is None or self.parts.of_tokens):
            logits = _padded(logits, real_BL)
        return ModelOutput(_padded(hidden_TH, real_BL), logits, self.parts.pair_logits(hidden_TH, read))

    def _segments(self, ids_BL: Tensor, segments_BL: Tensor | None) -> Tensor | None:
        """Checked segments, or None."""
        if segments_BL is None:
            return None
        if segments_BL.shape != ids_BL.shape:
            raise ValueError(f"token_type_ids have the shape {tuple(segments_BL.shape)}, the ids {tuple(ids_BL.shape)}")
        known = max(self.parts.backbone.config.segment_types, 1)
        if segments_BL.numel() and not 0 <= int(segments_BL.min()) <= int(segments_BL.max()) < known:
            raise ValueError(f"token_type_ids up to {int(segments_BL.max())}; the model has {known} segments")
        return segments_BL.to(ids_BL.device)


def load(checkpoint: str | Path, device: str = "cpu", offline: bool = False) -> Loaded:
    """A checkpoint to look at and to try: a run or a checkpoint of lmtool, a published folder or hf://org/name.

    UserError where it cannot be read, where a part of the backbone is missing, and for a head that lmtool does not
    have.
    """
    checkpoint = str(checkpoint)
    published = published_folder(checkpoint, offline)
    if published is not None:
        published.require_read_head()
    weights = read(checkpoint, offline)
    config = saved_config(checkpoint, offline)
    saved, tokenizer = saved_model(checkpoint, config, weights.tensors), None
    if has_tokenizer(weights.folder):
        parses = bool((config.get("tokenizer") or {}).get("parse_special_tokens"))
        tokenizer = Tokenizer.load(weights.folder, parses)
    parts, report = assemble(saved, tokenizer, trained=weights)
    assert report is not None
    if tokenizer is not None and saved.task is None and published_folder(checkpoint, offline) is not None:
        report = replace(report, ignored=(*report.ignored, *unread_layout(tokenizer, saved.model)))
    roles = {} if tokenizer is None else tokenizer.roles
    if tokenizer is not None and parts.first_token is not None:
        tokenizer = tokenizer.with_tokens(FORMATS[parts.form.text_format].new, parts.first_token)
    model = PaddedModel(parts, roles.get(saved.model.start_role or "")).to(device).eval()
    return Loaded(model, tokenizer, saved.model, report, config)


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint says of its model, as `assemble` takes it. tensors: which heads there are. task: the section
    of a task, with the form of its head."""

    model: ModelConfig
    tensors: Mapping[str, Tensor]
    task: Mapping[str, Any] | None
    tuned_by: Config | None
    seed: int
    exits: tuple[int, ...] = ()

    @property
    def learns(self) -> SavedModel:
        """Its heads."""
        return self

    def learner(self, backbone: Backbone, tokenizer: Tokenizer | None, seed: int) -> CheckpointModel:
        return CheckpointModel(backbone, self.tensors, self.task, seed)


def saved_model(checkpoint: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedModel:
    """The model of a saved configuration. UserError where it is not decoded."""
    task = saved.get("task")
    return SavedModel(
        section(checkpoint, saved, Choice("model")),
        tensors,
        task if isinstance(task, dict) else None,
        section(checkpoint, saved, Choice("tuning", optional=True)),
        saved.get("seed") or 0,
    )


def saved_config(checkpoint: str, offline: bool = False) -> dict[str, Any]:
    """The configuration in a checkpoint, of its model at least; not decoded yet."""
    published = published_folder(checkpoint, offline)
    if published is not None:
        return published.saved_config()
    saved = read_config(find(checkpoint))
    missing = [plugin for plugin in saved.get("plugins") or () if plugin not in plugins.typed()]
    if missing:
        hint = f"lmtool.config.plugins.load({missing!r}) first, if you trust it"
        raise UserError(f"checkpoint={checkpoint} was made with the plugin {missing[0]}, which is not loaded", hint)
    return saved


def section(checkpoint: str, saved: Mapping[str, Any], choice: Choice) -> Any:
    """The strictly decoded section of a component."""
    try:
        return choice.validate(saved.get(choice.group))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([choice.group, *map(str, first["loc"])])
        raise UserError(f"checkpoint={checkpoint}: {where}: {first['msg']}", "give another checkpoint") from error


def _real(ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """(B, L) bool: where a token is real. ValueError for wrong shapes, and rows with holes."""
    if ids_BL.ndim != 2:
        raise ValueError(f"ids have the shape {tuple(ids_BL.shape)}; (rows, length) is read")
    if mask_BL is None:
        return torch.ones_like(ids_BL, dtype=torch.bool)
    if mask_BL.shape != ids_BL.shape:
        raise ValueError(f"attention_mask has the shape {tuple(mask_BL.shape)}, the ids {tuple(ids_BL.shape)}")
    real_BL = mask_BL.to(ids_BL.device) != 0
    begins = real_BL[:, :1].sum(1) + (real_BL[:, 1:] & ~real_BL[:, :-1]).sum(1)
    if (begins > 1).any():
        raise ValueError(f"attention_mask: row {int((begins > 1).nonzero()[0])} has a hole between its tokens")
    return real_BL


def _packed(ids_BL: Tensor, real_BL: Tensor, segments_BL: Tensor | None = None) -> Packed:
    columns = {} if segments_BL is None else {"segment": segments_BL[real_BL].long()}
    return Packed(ids_BL[real_BL].long(), tuple(real_BL.sum(1).tolist()), columns)


def _padded(values: Tensor, real_BL: Tensor) -> Tensor:
    """(T, ...) back to (B, L, ...), zero where there is padding."""
    padded = values.new_zeros(*real_BL.shape, *values.shape[1:])
    padded[real_BL] = values
    return padded
