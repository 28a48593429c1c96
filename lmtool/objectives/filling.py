"""Mask filling: predictions of masked tokens, for the samples in a report and for texts of users.

Shape letters: T tokens, M masked positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.data.formats import text_format
from lmtool.errors import NotFinite, UserError
from lmtool.learners.base import Answers, BaseLearner, Inference, Responder
from lmtool.learners.model import indices_of, labels_of
from lmtool.objectives.examples.masked import MaskedExamples, TokenMasks
from lmtool.types import Batch, Packed

GUESSES = 5
"""Number of predictions shown for each mask."""
LogitsAt = Callable[[Packed, Tensor], Tensor]
"""A function from a packed batch and positions (M,) in it to the logits (M, V) of the vocabulary."""
AnyExamples = TypeVar("AnyExamples", bound=MaskedExamples)


class MaskFiller(BaseLearner):
    """The base class of learners with masked examples, which respond to a text by filling its masks. masks: the class
    that masks the examples. tokens_before: the number of tokens that `logits_at` puts before each text."""

    masks: ClassVar[type[TokenMasks]] = TokenMasks
    tokens_before: ClassVar[int] = 0

    @property
    def longest_filled(self) -> int:
        """The maximum length in tokens of a text with masks."""
        return self.backbone.longest_text - self.tokens_before

    def masked_examples(self, kind: type[AnyExamples], data: SplitData, max_length: int) -> AnyExamples:
        """Returns the examples of a split, masked by the class `masks`. kind: the class of the examples: windows of
        text, or pairs."""
        format_name = self.backbone.config.text_format
        return kind(self.config, self.tokenizer, format_name, data, max_length, self.seed, self.masks)

    @abstractmethod
    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        """Returns the logits (M, V) of the vocabulary at positions (M,) of a packed batch."""

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Each example has `pieces`, the original tokens as text, and `masked`: for each masked position the `position`
        in the text, the original piece (`truth`), the piece in the input (`shown`), and the five most probable pieces
        with their probabilities (`guesses`)."""
        return self.samples_of(batch, "mlm", self.logits_at, n)

    def samples_of(self, batch: Batch, term: str, logits_at: LogitsAt, n: int) -> list[JsonObject]:
        """Returns samples as in `samples`. term: the term whose targets are the masked positions."""
        indices, labels, pieces = indices_of(batch, term), labels_of(batch, term), self.tokenizer.pieces
        requested = batch.inputs.documents[indices] < n
        indices, labels = indices[requested], labels[requested]
        guesses = self.guesses(logits_at(batch.inputs, indices))
        tokens, input_tokens = batch.inputs.tokens.cpu().clone(), batch.inputs.tokens.cpu()[indices.cpu()]
        tokens[indices.cpu()] = labels.cpu()
        samples = []
        for start, length in list(zip(batch.inputs.starts, batch.inputs.lengths, strict=True))[:n]:
            masked = [
                {
                    "position": index - start,
                    "truth": pieces([int(labels[row])])[0],
                    "shown": pieces([int(input_tokens[row])])[0],
                    "guesses": guesses[row],
                }
                for row, index in enumerate(indices.tolist())
                if start <= index < start + length
            ]
            samples.append({"pieces": pieces(tokens[start : start + length]), "masked": masked})
        return samples

    def guesses(self, logits_MV: Tensor) -> list[list[list[object]]]:
        """Returns for each of M positions the most probable pieces with their probabilities."""
        # The token table may have padding rows after the vocabulary, which are no pieces.
        probability_MV = logits_MV.float().softmax(-1)[:, : self.tokenizer.vocab_size]
        probabilities, tokens = probability_MV.topk(min(GUESSES, self.tokenizer.vocab_size))
        rows = zip(tokens.tolist(), probabilities.tolist(), strict=True)
        return [list(map(list, zip(self.tokenizer.pieces(ids), row, strict=True))) for ids, row in rows]

    def responder(self) -> MaskResponder:
        return MaskResponder(self)


class MaskResponder(Responder):
    """Fills the masks of texts."""

    learner: MaskFiller
    fills_masks = True

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Fills the masks of texts, which are mask tokens of the tokenizer, such as [MASK]. Returns for each `text` the
        `filled` text with the most probable pieces, and `masks`, which has the five `guesses` of each mask with their
        probabilities. Reading the records raises UserError if a text has no mask, or is longer than the model
        supports."""
        return Answers(self._fill(rows, inference))

    @torch.no_grad()
    def _fill(self, rows: Rows, inference: Inference) -> Iterator[JsonObject]:
        tokenizer, backbone = self.learner.tokenizer, self.learner.backbone
        mask = tokenizer.role("mask")
        mask_text = tokenizer.pieces([mask])[0]
        format_ = text_format(backbone.config.text_format, tokenizer)
        for text, (file, line) in zip(rows.columns["text"], rows.origin, strict=True):
            parts = [tokenizer.encode(part) for part in text.split(mask_text)]
            if len(parts) == 1:
                raise UserError(
                    f"{file}:{line}: {text[:80]!r} has no {mask_text} to fill",
                    f"write {mask_text} where a word is missing",
                )
            tokens, columns = format_.join(np.concatenate([parts[0], *(np.append(mask, part) for part in parts[1:])]))
            if len(tokens) > self.learner.longest_filled:
                raise UserError(
                    f"{file}:{line}: the text has {len(tokens)} tokens, the model reads {self.learner.longest_filled}",
                    "shorten the text",
                )
            packed = Packed(
                torch.from_numpy(np.asarray(tokens, dtype=np.int64)),
                (len(tokens),),
                {name: torch.from_numpy(np.asarray(column, dtype=np.int64)) for name, column in columns.items()},
            ).to(backbone.embed.token.weight.device)
            indices = torch.nonzero(packed.tokens == mask)[:, 0]
            with inference.precision.autocast():
                logits_MV = self.learner.logits_at(packed, indices)
            if not bool(torch.isfinite(logits_MV).all()):
                raise NotFinite("predictions")
            filled = packed.tokens.clone()
            filled[indices] = logits_MV.float().softmax(-1)[:, : tokenizer.vocab_size].argmax(-1)
            guesses = [{"guesses": row} for row in self.learner.guesses(logits_MV)]
            yield {"text": text, "filled": tokenizer.decode(filled.tolist()), "masks": guesses}

    def line(self, record: JsonObject) -> str:
        guesses = "; ".join(
            ", ".join(f"{piece} {probability:.2f}" for piece, probability in mask["guesses"])
            for mask in record["masks"]
        )
        return f"{record['filled']}  ({guesses})"
