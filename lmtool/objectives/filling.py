"""Mask filling: for the report's samples, and for texts from users.

Shape letters: T tokens, M masked positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.data.examples import Rows
from lmtool.data.formats import text_format
from lmtool.errors import NotFinite, UserError
from lmtool.learners.base import BaseLearner, Inference
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed

GUESSES = 5
# Logits (M, V) of the vocabulary at positions (M,) of a packed batch.
LogitsAt = Callable[[Packed, Tensor], Tensor]


def masked_samples(
    batch: Batch, at: Tensor, labels: Tensor, logits_at: LogitsAt, tokenizer: Tokenizer, n: int
) -> list[dict[str, Any]]:
    """The first n examples of a batch as plain data: `pieces` of the original text, and `masked`: for each masked
    position its `position` among them, the `truth`, the token `shown` to the model, and `guesses`: the five most
    probable pieces with probabilities. at, labels: (M,) the masked positions and original tokens."""
    requested = batch.inputs.documents[at] < n
    at, labels = at[requested], labels[requested]
    # Table rows beyond the vocabulary have no piece.
    probability_MV = logits_at(batch.inputs, at).float().softmax(-1)[:, : tokenizer.vocab_size]
    fractions, guesses = (tensor.cpu() for tensor in probability_MV.topk(min(GUESSES, tokenizer.vocab_size)))
    tokens, visible = batch.inputs.tokens.cpu().clone(), batch.inputs.tokens.cpu()[at.cpu()]
    tokens[at.cpu()] = labels.cpu()
    samples = []
    for start, length in list(zip(batch.inputs.starts, batch.inputs.lengths, strict=True))[:n]:
        masked = [
            {
                "position": place - start,
                "truth": tokenizer.pieces([int(labels[row])])[0],
                "shown": tokenizer.pieces([int(visible[row])])[0],
                "guesses": list(map(list, zip(tokenizer.pieces(guesses[row]), fractions[row].tolist(), strict=True))),
            }
            for row, place in enumerate(at.tolist())
            if start <= place < start + length
        ]
        samples.append({"pieces": tokenizer.pieces(tokens[start : start + length]), "masked": masked})
    return samples


def filled_line(record: dict[str, Any]) -> str:
    """A result of `fill_masks` as a line of the screen."""
    guesses = "; ".join(
        ", ".join(f"{piece} {share:.2f}" for piece, share in mask["guesses"]) for mask in record["masks"]
    )
    return f"{record['filled']}  ({guesses})"


def fill_masks(
    backbone: Backbone,
    logits_at: LogitsAt,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    autocast: Callable[[], AbstractContextManager],
) -> Iterator[dict[str, Any]]:
    """Fills the masks of texts, written as the tokenizer's mask token. For each `text`: the `filled` text with the best
    pieces, and `masks`, for each the five `guesses` with their probabilities. UserError if there is no mask, or the
    text is longer than the model supports."""
    mask = tokenizer.role("mask")
    written = tokenizer.pieces([mask])[0]
    layout = text_format(backbone.config.text_format, tokenizer)
    device = backbone.embed.token.weight.device
    for text in texts:
        runs = [tokenizer.encode(run) for run in text.split(written)]
        if len(runs) == 1:
            raise UserError(f"no {written} to fill in {text[:80]!r}", f"write {written} where a word is missing")
        ids = np.concatenate([runs[0], *(np.append(mask, run) for run in runs[1:])])
        tokens, columns = layout.join(ids)
        if len(tokens) > backbone.longest_text:
            raise UserError(f"{len(tokens)} tokens; the model reads {backbone.longest_text}", "shorten the text")
        packed = Packed(
            torch.from_numpy(np.asarray(tokens, dtype=np.int64)),
            (len(tokens),),
            {name: torch.from_numpy(np.asarray(column, dtype=np.int64)) for name, column in columns.items()},
        ).to(device)
        at = torch.nonzero(packed.tokens == mask)[:, 0]
        with autocast():
            logits_MV = logits_at(packed, at)
        if not bool(torch.isfinite(logits_MV).all()):
            raise NotFinite("predictions")
        fractions, best = logits_MV.float().softmax(-1)[:, : tokenizer.vocab_size].topk(GUESSES)
        filled = packed.tokens.clone()
        filled[at] = best[:, 0]
        yield {
            "text": text,
            "filled": tokenizer.decode(filled.tolist()),
            "masks": [
                {"guesses": list(map(list, zip(tokenizer.pieces(row), share.tolist(), strict=True)))}
                for row, share in zip(best.tolist(), fractions, strict=True)
            ],
        }


class MaskFiller(BaseLearner):
    """A learner with a term `mlm` that responds to a text by filling its masks."""

    @abstractmethod
    def logits_at(self, packed: Packed, at: Tensor) -> Tensor:
        """(M, V) logits of the vocabulary at positions (M,) of a packed batch."""

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The first n examples of a batch with masks and predictions, see `masked_samples`."""
        at, labels = indices_of(batch, "mlm"), labels_of(batch, "mlm")
        return masked_samples(batch, at, labels, self.logits_at, self.tokenizer, n)

    @torch.no_grad()
    def respond(self, rows: Rows, inference: Inference) -> Iterator[dict[str, Any]]:
        """Fills the masks of texts, see `fill_masks`."""
        texts, autocast = rows.columns["text"], inference.precision.autocast
        yield from fill_masks(self.backbone, self.logits_at, self.tokenizer, texts, autocast)

    def line(self, record: dict[str, Any]) -> str:
        return filled_line(record)
