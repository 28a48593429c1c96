"""`lmtool.load`: a checkpoint as a model over padded tensors, with its tokenizer.

Shape letters: B rows, L their padded length, T real tokens, H hidden width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonMapping
from lmtool.data.configs import FORMATS
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.writing import writer_of
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder import shift_right
from lmtool.models.heads.lm import LMHead
from lmtool.system.terminal import counted
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed
from lmtool.weights.assemble import LoadReport, assemble
from lmtool.weights.folders import hf_folder
from lmtool.weights.reading import layout_warnings, read
from lmtool.weights.saved_model import CheckpointModel, saved_config, saved_model


@dataclass(frozen=True)
class ModelOutput:
    """The output of `PaddedModel`.

    Attributes:
        hidden: Hidden states of the last layer, (B, L, H); zero at padding. In an encoder-decoder, the states
            of the decoder, or of the encoder if a task's head reads the encoder.
        logits: Logits of the main head; None without such a head, and for a task that scores spans. (B, C) for a task
            that scores texts, (B, L, C) for a task that scores tokens, (B, L, V) for a language model, (B, L) for
            replaced token detection.
        pair_logits: Logits of a head that classifies text pairs, (B, 2); None without such a head. The classes are:
            the second text follows the first or is random (next sentence prediction); or the two texts are in order or
            swapped (sentence order prediction).
    """

    hidden: Tensor
    logits: Tensor | None
    pair_logits: Tensor | None = None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A loaded checkpoint, its model in evaluation mode. tokenizer: None if the checkpoint has no tokenizer. report:
    which parts were loaded. saved: the checkpoint's complete configuration, as plain JSON data."""

    model: PaddedModel
    tokenizer: Tokenizer | None
    config: ModelConfig
    report: LoadReport
    saved: JsonMapping

    @property
    def task(self) -> JsonMapping | None:
        """The `task` section of a finetuned checkpoint, or None."""
        task = self.saved.get("task")
        return task if isinstance(task, dict) else None

    def generate(self, prompts: Sequence[str], seed: int = 0, **settings: Any) -> list[str]:
        """Generates a text for each prompt: a continuation by a decoder, an answer by an encoder-decoder. prompts: the
        input texts. seed: seed of the sampling. settings: fields of `GenerationConfig` (max_new_tokens, temperature,
        beams, ...). Raises UserError if the checkpoint has no tokenizer or no language modeling head."""
        head = dict(self.model.parts.heads.items()).get("lm")
        if self.tokenizer is None or not isinstance(head, LMHead):
            if self.tokenizer is None:
                raise UserError("the checkpoint has no tokenizer", "use a checkpoint whose folder has tokenizer.json")
            hint = "use the checkpoint of a generative language model"
            raise UserError("the checkpoint has no language modeling head", hint)
        writer = writer_of(self.model.parts.backbone, head, self.tokenizer, self.task)
        ids = writer.prompts(prompts, [("prompts", number) for number in range(len(prompts))])
        config = GenerationConfig(**settings).with_published(self.saved.get("generation", {}))
        new_ids = writer.write(ids, config, seed)
        return [writer.text(*pair) for pair in zip(ids, new_ids, strict=True)]


class PaddedModel(nn.Module):
    """A model that takes and returns padded tensors, as models in transformers do. Internally, the real tokens are
    packed. parts: the backbone and its heads. start: id of the token with which the decoder of an encoder-decoder
    starts; None if there is none."""

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
        """Computes hidden states and logits.

        Args:
            input_ids: Token ids, (B, L), int64.
            attention_mask: Nonzero at real tokens, (B, L). None means that all tokens are real. The real tokens of a
                row must be contiguous; positions count from the first real token.
            decoder_input_ids: Input of the decoder in an encoder-decoder, (B, L'): shifted to the right, and without
                padding. None for a task's head, whose decoder reads the same text as the encoder.
            token_type_ids: Segments, (B, L): 1 in the second text of a pair. None means 0 everywhere.

        Raises:
            ValueError: If a shape is wrong, if real tokens are not contiguous, or if a segment does not exist in the
                model.
        """
        two_stacks = self.parts.backbone.config.architecture == "encoder_decoder"
        same_input = two_stacks and self.parts.task is not None and self.start is not None
        if two_stacks != (decoder_input_ids is not None) and not same_input:
            reason = "missing, but the model has a decoder" if two_stacks else "allowed for encoder-decoders only"
            raise ValueError(f"decoder_input_ids are {reason}")
        real_BL = _real_tokens(input_ids, attention_mask)
        inputs = _pack(input_ids, real_BL, self._segments(input_ids, token_type_ids))
        outputs = None
        if decoder_input_ids is not None:
            real_BL = _real_tokens(decoder_input_ids, None)
            outputs = _pack(decoder_input_ids, real_BL)
        elif two_stacks and self.start is not None:
            outputs = shift_right(inputs, self.start)
        hidden_TH = self.parts.hidden(inputs, outputs)
        texts = inputs if outputs is None else outputs
        logits = self.parts.logits(hidden_TH, texts)
        if logits is not None and (self.parts.task is None or self.parts.scores_tokens):
            logits = _pad(logits, real_BL)
        return ModelOutput(_pad(hidden_TH, real_BL), logits, self.parts.pair_logits(hidden_TH, texts))

    def _segments(self, ids_BL: Tensor, segments_BL: Tensor | None) -> Tensor | None:
        if segments_BL is None:
            return None
        if segments_BL.shape != ids_BL.shape:
            raise ValueError(
                f"token_type_ids have the shape {tuple(segments_BL.shape)}, but input_ids have {tuple(ids_BL.shape)}"
            )
        segment_types = max(self.parts.backbone.config.segment_types, 1)
        if segments_BL.numel() and not 0 <= int(segments_BL.min()) <= int(segments_BL.max()) < segment_types:
            raise ValueError(
                f"token_type_ids are {int(segments_BL.min())} to {int(segments_BL.max())}, but the model has "
                f"{counted(segment_types, 'segment')}, numbered from 0"
            )
        return segments_BL.to(ids_BL.device)


def load(checkpoint: str | Path, device: str = "cpu", offline: bool = False) -> LoadedCheckpoint:
    """Loads a checkpoint for inference. checkpoint: a run or checkpoint of lmtool, a folder in Hugging Face's format,
    or hf://org/name. device: that of torch on which the model is placed. offline: whether to use only files that are
    already downloaded. Raises UserError if the checkpoint cannot be read, if a tensor of the backbone is missing, or if
    lmtool does not support the checkpoint's head."""
    checkpoint = str(checkpoint)
    folder = hf_folder(checkpoint, offline)
    if folder is not None:
        folder.require_supported_head()
    weights = read(checkpoint, offline)
    config = saved_config(checkpoint, offline)
    saved, tokenizer = saved_model(checkpoint, config, weights.tensors), None
    if has_tokenizer(weights.folder):
        parses = bool((config.get("tokenizer") or {}).get("parse_special_tokens"))
        tokenizer = Tokenizer.load(weights.folder, parses)
    parts, report = assemble(saved, tokenizer, trained=weights)
    assert report is not None
    if tokenizer is not None and saved.task is None and hf_folder(checkpoint, offline) is not None:
        report = replace(report, ignored=(*report.ignored, *layout_warnings(tokenizer, saved.model)))
    special_ids = {} if tokenizer is None else tokenizer.roles
    if tokenizer is not None and parts.first_token is not None:
        tokenizer = tokenizer.with_tokens(FORMATS[parts.sequence_form.text_format].added, parts.first_token)
    model = PaddedModel(parts, special_ids.get(saved.model.start_role or "")).to(device).eval()
    return LoadedCheckpoint(model, tokenizer, saved.model, report, config)


def _real_tokens(ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Returns (B, L) bool. Raises ValueError if a shape is wrong, or if the real tokens of a row are not contiguous."""
    if ids_BL.ndim != 2:
        raise ValueError(f"ids have the shape {tuple(ids_BL.shape)}; expected two dimensions, (rows, length)")
    if mask_BL is None:
        return torch.ones_like(ids_BL, dtype=torch.bool)
    if mask_BL.shape != ids_BL.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask_BL.shape)}, but input_ids have {tuple(ids_BL.shape)}"
        )
    real_BL = mask_BL.to(ids_BL.device) != 0
    # The number of contiguous runs of real tokens in each row.
    starts = real_BL[:, :1].sum(1) + (real_BL[:, 1:] & ~real_BL[:, :-1]).sum(1)
    if (starts > 1).any():
        raise ValueError(f"attention_mask: row {int((starts > 1).nonzero()[0])} has a gap between its tokens")
    return real_BL


def _pack(ids_BL: Tensor, real_BL: Tensor, segments_BL: Tensor | None = None) -> Packed:
    columns = {} if segments_BL is None else {"segment": segments_BL[real_BL].long()}
    return Packed(ids_BL[real_BL].long(), tuple(real_BL.sum(1).tolist()), columns)


def _pad(values: Tensor, real_BL: Tensor) -> Tensor:
    """Returns the packed values, (T, ...), as padded rows, (B, L, ...), with zeros at padding."""
    padded = values.new_zeros(*real_BL.shape, *values.shape[1:])
    padded[real_BL] = values
    return padded
