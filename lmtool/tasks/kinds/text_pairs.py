"""Pairs of a source and a target as packed batches: of an encoder-decoder one on each side, of a decoder one behind the
other, the loss on the target alone.

Shape letters: E rows, N of them in a batch, T tokens, M places that predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Template, assemble, ragged_ranges
from lmtool.data.formats import text_format
from lmtool.data.plan import Plan
from lmtool.data.split import Rows
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder import shifted
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.tasks.configs import Seq2SeqConfig
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


class TextPairs:
    """A row is a source and, where the rows are labelled, its first target. Either is cut at its end where it is too
    long: an encoder-decoder's source to max_length, a decoder's to what the target leaves of it; an encoder-decoder's
    target to `longest_answer`, the tokens of the longest one it reads."""

    def __init__(
        self,
        config: Seq2SeqConfig,
        rows: Rows,
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_length: int,
        split: str,
        longest_answer: int,
    ):
        if not len(rows):
            raise UserError(f"the {split} split has no rows")
        self.config, self.rows, self.split, self.model = config, rows, split, model
        layout = text_format(model.text_format, tokenizer)
        self.two_stacks = isinstance(model, EncoderDecoderConfig)
        self.template = Template.of(layout, 1 if self.two_stacks else 2)
        self.start = tokenizer.role(model.start_role) if isinstance(model, EncoderDecoderConfig) else None
        source_room, self.target_room = self._room(max_length, longest_answer)
        self.tokenizer = tokenizer
        self.sources, self.truncated = self.sourced(source_room)
        self.source_lengths = np.minimum(self.sources.lengths, source_room)
        self.targets, self.target_lengths = None, np.zeros(len(rows), dtype=np.int64)
        self.truncated_targets = 0
        if rows.labels is not None:
            self.targets = EncodedTexts([targets[0] for targets in rows.labels], tokenizer)
            self.target_lengths = np.minimum(self.targets.lengths, self.target_room)
            self.truncated_targets = int(np.sum(self.targets.lengths > self.target_room))
        records = np.empty(len(rows), dtype=[("row", "i8")])
        records["row"] = np.arange(len(rows))
        sides = 2 if self.two_stacks and self.targets is not None else 1
        overhead = self.template.overhead * sides
        self._plan = Plan(records, self.source_lengths + self.target_lengths + overhead)

    def _room(self, max_length: int, longest_answer: int) -> tuple[int, int]:
        """Tokens of a source and of a target, at most, special ones aside."""
        overhead, wanted = self.template.overhead, self.config.target_tokens
        if self.two_stacks:
            source, target = max_length - overhead, min(wanted, longest_answer) - overhead
        else:
            source, target = max_length - overhead - wanted, wanted
        if source < 1 or target < 1:
            raise UserError(
                f"max_length={max_length} and task.target_tokens={wanted} leave no room for a source",
                f"give max_length={2 * wanted + overhead}, or a smaller task.target_tokens=",
            )
        return source, target

    def sourced(self, room: int) -> tuple[EncodedTexts, int]:
        """The sources, whose ends are left out behind `room` tokens, and how many these cut."""
        (texts,) = self.rows.columns.values()
        sources = EncodedTexts([self.config.prefix + text for text in texts], self.tokenizer)
        return sources, int(np.sum(sources.lengths > room))

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """What a model reads of these rows before it writes."""
        rows_N = np.asarray(numbers, dtype=np.int64)
        inputs = self._inputs(rows_N)
        return [ids.tolist() for ids in inputs.tokens.split(list(inputs.lengths))]

    def _inputs(self, rows_N: np.ndarray) -> Any:
        lengths = self.source_lengths[rows_N]
        ids = self.sources.read(rows_N, lengths)
        if self.two_stacks:
            return assemble(self.template, [(ids, lengths)]).packed()
        pieces = self.template.pieces
        alone = Template((pieces[0], pieces[1]), {}, {})
        return assemble(alone, [(ids, lengths)]).packed()

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        rows_N = rows["row"]
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        shared = (numbers, torch.zeros(len(numbers), dtype=torch.int32))
        places = torch.from_numpy(rows_N.astype(np.int64))
        if self.targets is None:
            return Batch(self._inputs(rows_N), {}, *shared, None, places)
        lengths = self.target_lengths[rows_N]
        target_ids, term = self.targets.read(rows_N, lengths), self.config.name
        if self.two_stacks:
            outputs = assemble(self.template, [(target_ids, lengths)])
            whole = outputs.packed()
            sides = {term: Target(whole.tokens, at=torch.arange(len(whole.tokens)), side="outputs")}
            return Batch(self._inputs(rows_N), sides, *shared, shifted(whole, self.start or 0), places)
        source_lengths = self.source_lengths[rows_N]
        texts = [(self.sources.read(rows_N, source_lengths), source_lengths), (target_ids, lengths)]
        joined = assemble(self.template, texts)
        before = source_lengths + len(self.template.pieces[0]) + len(self.template.pieces[1])
        written = joined.lengths - before
        at = ragged_ranges(np.cumsum(joined.lengths) - written - 1, written)
        packed = joined.packed()
        if self.config.mask == "prefix":
            packed = replace(packed, prefixes=tuple(before.tolist()))
        predicted = {term: Target(torch.from_numpy(joined.tokens[at + 1]), at=torch.from_numpy(at))}
        return Batch(packed, predicted, *shared, None, places)

    def facts(self) -> dict[str, Any]:
        """Rows, tokens, and how many sources and targets were cut to fit."""
        facts = {
            "split": self.split,
            **self._plan.facts(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self._plan),
            "truncated_targets": self.truncated_targets,
        }
        if self.truncated_targets:
            share = self.truncated_targets / len(self._plan)
            facts["warnings"] = [
                f"{self.truncated_targets:,} {self.split} targets ({share:.1%}) are cut to {self.target_room} tokens: "
                "give a larger task.target_tokens="
            ]
        return facts
