"""Learning to write texts by teacher forcing, with encoder-decoders and with decoders, which read the source before the
target.

Shape letters: N documents of a batch, T their tokens, M predicted tokens, H hidden width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtool import random_streams
from lmtool.data.examples import Plan, Rows, SplitData
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import ContinuationDecoding, Decoding, EncoderDecoderDecoding
from lmtool.learners.model import indices_of
from lmtool.learners.writing import Writer, writer_of
from lmtool.models.base import Backbone, Decoder
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder import EncoderDecoder, shifted
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.tasks.configs import ScheduledSamplingConfig, Seq2SeqConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskLearner, TextPairInspector
from lmtool.tasks.kinds.texts import EncodedTexts
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target, send


def share_of_truth(config: ScheduledSamplingConfig, step: int) -> float:
    """The probability of the true token at this step, counted from 1."""
    if config.schedule == "none":
        return 1.0
    pace = step / config.steps
    if config.schedule == "linear":
        share = 1.0 - pace
    elif config.schedule == "exponential":
        share = math.exp(-pace)
    else:
        share = config.steps / (config.steps + math.exp(min(pace, 700.0)))
    return max(config.least, share)


def read_step_by_step(
    decoding: Decoding, texts: Sequence[Sequence[int]], own: Sequence[Sequence[bool]]
) -> list[list[int]]:
    """Decodes N texts with scheduled sampling, token by token: the true token, or the best prediction from everything
    read so far.

    Args:
        decoding: The decoder, after the beginning of each text.
        texts: True tokens of each text.
        own: Whether each of them is replaced by a prediction.

    Returns:
        The tokens read for each text.
    """
    read: list[list[int]] = [[] for _ in texts]
    active, step, logits_RV = list(range(len(texts))), 0, decoding.begin()
    while True:
        best = logits_RV.argmax(-1).tolist()
        rows = [row for row, number in enumerate(active) if step < len(texts[number])]
        if not rows:
            return read
        for row in rows:
            number = active[row]
            read[number].append(best[row] if own[number][step] else texts[number][step])
        left = rows if len(rows) < len(active) else None
        active = [active[row] for row in rows]
        tokens_R = torch.tensor([read[number][step] for number in active], device=decoding.device)
        logits_RV, step = decoding.advance(tokens_R, left), step + 1


# Pairs of a source and a target as packed batches: on both sides of an encoder-decoder, or concatenated for a decoder,
# with the loss on the target only.
# Shape letters: E rows, N of them in a batch, T tokens, M predicting positions.


class TextPairs:
    """A row is a source and, if labeled, its first target, both truncated at the end: an encoder-decoder's source to
    max_length, a decoder's to the capacity that the target leaves; an encoder-decoder's target to `longest_answer`, the
    longest target it supports."""

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
        self.template = FormatTemplate.of(layout, 1 if self.two_stacks else 2)
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
        special_count = self.template.special_count * sides
        self._plan = Plan(records, self.source_lengths + self.target_lengths + special_count)

    def _room(self, max_length: int, longest_answer: int) -> tuple[int, int]:
        """Maximum tokens of a source and of a target, without special tokens."""
        special_count, wanted = self.template.special_count, self.config.target_tokens
        if self.two_stacks:
            source, target = max_length - special_count, min(wanted, longest_answer) - special_count
        else:
            source, target = max_length - special_count - wanted, wanted
        if source < 1 or target < 1:
            raise UserError(
                f"max_length={max_length} and task.target_tokens={wanted} leave no capacity for a source",
                f"set max_length={2 * wanted + special_count}, or a smaller task.target_tokens=",
            )
        return source, target

    def sourced(self, room: int) -> tuple[EncodedTexts, int]:
        """The sources, to be truncated to `room` tokens, and how many of them exceed it."""
        (texts,) = self.rows.columns.values()
        sources = EncodedTexts([self.config.prefix + text for text in texts], self.tokenizer)
        return sources, int(np.sum(sources.lengths > room))

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """The tokens that a model reads for these rows before it writes."""
        rows_N = np.asarray(numbers, dtype=np.int64)
        inputs = self._inputs(rows_N)
        return [ids.tolist() for ids in inputs.tokens.split(list(inputs.lengths))]

    def _inputs(self, rows_N: np.ndarray) -> Any:
        lengths = self.source_lengths[rows_N]
        ids = self.sources.read(rows_N, lengths)
        if self.two_stacks:
            return assemble(self.template, [(ids, lengths)]).packed()
        pieces = self.template.pieces
        prompt_template = FormatTemplate((pieces[0], pieces[1]), {}, {})
        return assemble(prompt_template, [(ids, lengths)]).packed()

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

    def metadata(self) -> dict[str, object]:
        """Counts of rows and tokens, and of truncated sources and targets."""
        metadata = {
            "split": self.split,
            **self._plan.metadata(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self._plan),
            "truncated_targets": self.truncated_targets,
        }
        if self.truncated_targets:
            share = self.truncated_targets / len(self._plan)
            metadata["warnings"] = [
                f"{self.truncated_targets:,} {self.split} targets ({share:.1%}) are truncated to {self.target_room} "
                "tokens: set a larger task.target_tokens="
            ]
        return metadata


class TextLearner(TaskLearner):
    """The one term is the cross entropy of every target token, including its end."""

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        # The pretrained head, if any: a target is text like any other.
        self.add_head("lm", lm_head(backbone))

    @property
    @abstractmethod
    def writing(self) -> Seq2SeqConfig:
        """How texts are read, learned and generated."""

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads["lm"])

    @property
    def _table(self) -> Tensor:
        return self.backbone.embed.token.weight

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest target that the backbone supports."""
        backbone = self.backbone
        return backbone.longest_answer if isinstance(backbone, EncoderDecoder) else backbone.longest_text

    def pairs_of(self, rows: Rows, max_length: int, split: str) -> TextPairs:
        """Pairs of sources and targets for this backbone."""
        reads = self.writing, rows, self.tokenizer, self.backbone.config
        return TextPairs(*reads, max_length, split, self.longest_answer)

    def inspector(self, examples: TextPairs, max_length: int) -> TextPairInspector:
        return TextPairInspector(self, examples, max_length)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(self.labels(batch)))}

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(M, H) hidden states at the predicting positions."""
        read_M = indices_of(batch, self.term) if batch.outputs is None else None
        return self.hidden_of(batch, self.dropout_rng(batch, step), read_M)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        truth = share_of_truth(self.writing.scheduled_sampling, step)
        if self.training and truth < 1.0:
            batch = self._with_predictions(batch, step, truth)
        labels = self.labels(batch)
        total = self._lm.loss_sum(self.outputs(batch, step), self._table, labels, self.writing.label_smoothing)
        return StepOutput({self.term: total}, self.weights)

    @torch.no_grad()
    def _with_predictions(self, batch: Batch, step: int, truth: float) -> Batch:
        """Replaces some true tokens of the batch by the model's predictions. truth: probability of keeping the true
        token."""
        host = batch.host
        packed = host.inputs if host.outputs is None else host.outputs
        # Target token m is read one position after the one that predicts it, unless it is the text's last one.
        at_M = indices_of(host, self.term)
        documents_M = packed.documents[at_M]
        ends_N = torch.tensor([start + length for start, length in zip(packed.starts, packed.lengths, strict=True)])
        read_M = at_M + 1 < ends_N[documents_M]
        uniform = random_streams.uniform_at(
            self.seed, "sample", step, host.examples[documents_M].numpy(), packed.positions[at_M].numpy()
        )
        predicted_M = read_M & (torch.from_numpy(uniform) >= truth)
        side = batch.inputs if batch.outputs is None else batch.outputs
        tokens_T, device = side.tokens.clone(), side.tokens.device
        self.eval()
        try:
            if self.writing.scheduled_sampling.predictions == "step_by_step":
                predicted_T = torch.zeros(len(tokens_T), dtype=torch.bool)
                predicted_T[at_M[predicted_M] + 1] = True
                tokens_T = send(self._stepwise(host, packed, predicted_T), device)
            else:
                _, best_M = self._lm.scores(self.outputs(batch, step), self._table, self.labels(batch))
                chosen = send(predicted_M.nonzero()[:, 0], device)
                tokens_T[send(at_M, device)[chosen] + 1] = best_M[chosen]
        finally:
            self.train()
        changed = replace(side, tokens=tokens_T)
        return replace(batch, inputs=changed) if batch.outputs is None else replace(batch, outputs=changed)

    def _stepwise(self, host: Batch, packed: Packed, predicted_T: Tensor) -> Tensor:
        """(T,) the tokens of the written side, on the host; those selected by `own_T` are predictions."""
        at_M = indices_of(host, self.term)
        first_N = torch.full((len(packed.lengths),), len(packed.tokens)).scatter_reduce(
            0, packed.documents[at_M], at_M, "amin"
        )
        started = [int(first) + 1 - start for first, start in zip(first_N, packed.starts, strict=True)]
        texts, owned = packed.tokens.split(packed.lengths), predicted_T.split(packed.lengths)
        starts = [text[:count].tolist() for text, count in zip(texts, started, strict=True)]
        more = [text[count:].tolist() for text, count in zip(texts, started, strict=True)]
        rows, longest = self.backbone.config.vocab_size, max(packed.lengths)
        decoding: Decoding
        if isinstance(self.backbone, EncoderDecoder):
            inputs = [text.tolist() for text in host.inputs.tokens.split(host.inputs.lengths)]
            decoding = EncoderDecoderDecoding(self.backbone, self._lm, rows, inputs, starts[0][0], longest)
        else:
            assert isinstance(self.backbone, Decoder)
            decoding = ContinuationDecoding(self.backbone, self._lm, rows, starts, longest, bool(packed.prefixes))
        own = [flags[count:].tolist() for flags, count in zip(owned, started, strict=True)]
        read = read_step_by_step(decoding, more, own)
        return torch.tensor([token for pair in zip(starts, read, strict=True) for part in pair for token in part])

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        side = batch.inputs if batch.outputs is None else batch.outputs
        labels = self.labels(batch)
        each, best = self._lm.scores(outputs, self._table, labels)
        return Scores(each, labels, best, side.documents[indices_of(batch, self.term)])

    def predictors(self, train: SplitData, examples: TextPairs) -> dict[str, ConstantPredictor]:
        """Unigrams of the training targets, including the special tokens around them."""
        assert examples.targets is not None
        counts = token_counts(examples.targets.ids, self.tokenizer.vocab_size)
        for token in (
            examples.template.pieces[-1] if not examples.two_stacks else np.concatenate(examples.template.pieces)
        ):
            counts[token] += len(examples.rows)
        return {self.term: ConstantPredictor.of_counts("unigram", counts)}

    def writes(self) -> GenerationConfig:
        return self.writing.generation

    def label_of(self, text: str) -> object:
        """A generated text as the only reference of its row."""
        return (text,) if text.strip() else None

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        return []  # see predictions.jsonl

    def writer(self) -> Writer:
        """Reads a source as in training."""
        section = {"prefix": self.writing.prefix, "mask": self.writing.mask}
        return writer_of(self.backbone, self._lm, self.tokenizer, section)
