"""Learning to write texts by teacher forcing: with encoder-decoders, and with decoders that read the source before the
target.

Shape letters: N documents of a batch, T their tokens, M predicted tokens, H hidden width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.decoding import ContinuationDecoding, Decoding, EncoderDecoderDecoding
from lmtool.learners.inspection import Inspector, RunningStatistics
from lmtool.learners.model import indices_of
from lmtool.learners.writing import Writer, writer_of
from lmtool.models.base import Backbone, Decoder
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder import EncoderDecoder, shift_right
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.tasks.configs.texts import ScheduledSamplingConfig, Seq2SeqConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskInspector, TaskLearner, TaskResponder
from lmtool.tasks.kinds.predictions import Label
from lmtool.tasks.kinds.texts import EncodedTexts, TaskExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target, send

# math.exp overflows above 709.
_MAX_EXPONENT = 700.0


def truth_probability(config: ScheduledSamplingConfig, step: int) -> float:
    """Returns the probability of reading the true token instead of a prediction (Bengio et al. 2015, section 2.4).
    step: counted from 1."""
    if config.schedule == "none":
        return 1.0
    progress = step / config.steps
    if config.schedule == "linear":
        probability = 1.0 - progress
    elif config.schedule == "exponential":
        probability = math.exp(-progress)
    else:
        probability = config.steps / (config.steps + math.exp(min(progress, _MAX_EXPONENT)))
    return max(config.least, probability)


def read_step_by_step(
    decoding: Decoding, texts: Sequence[Sequence[int]], replaced: Sequence[Sequence[bool]]
) -> list[list[int]]:
    """Decodes N texts token by token with scheduled sampling: at each position the model reads the true token or, where
    `replaced` is true, its own best prediction from all tokens that it has read before. decoding: has read the
    beginning of each text. Returns the tokens that the model read for each text."""
    read: list[list[int]] = [[] for _ in texts]
    active, step, logits_RV = list(range(len(texts))), 0, decoding.read_prompts()
    while True:
        best = logits_RV.argmax(-1).tolist()
        rows = [row for row, number in enumerate(active) if step < len(texts[number])]
        if not rows:
            return read
        for row in rows:
            number = active[row]
            read[number].append(best[row] if replaced[number][step] else texts[number][step])
        remaining_rows = rows if len(rows) < len(active) else None
        active = [active[row] for row in rows]
        tokens_R = torch.tensor([read[number][step] for number in active], device=decoding.device)
        logits_RV, step = decoding.advance(tokens_R, remaining_rows), step + 1


@dataclass(frozen=True)
class PairFormat:
    """How pairs of texts become batches of a model. max_length: the maximum number of tokens of an encoder-decoder's
    source, or of a decoder's source and target together. longest_target: the maximum number of tokens of a target that
    the model supports."""

    config: Seq2SeqConfig
    tokenizer: Tokenizer
    model: ModelConfig
    max_length: int
    longest_target: int


class TextPairs(TaskExamples):
    """Examples of a source and, if the row is labeled, its first target.

    An encoder-decoder reads the source in its encoder and the target in its decoder. A decoder reads them concatenated,
    with the loss only on the target. Both are truncated at the end (a dialogue at its start): a decoder's source to the
    capacity that the target leaves, an encoder-decoder's target to the maximum that the model supports.

    Shape letters: E rows, N of them in a batch, T tokens, M predicting positions.
    """

    def __init__(self, pair_format: PairFormat, rows: Rows, split: str):
        config, tokenizer, model = pair_format.config, pair_format.tokenizer, pair_format.model
        super().__init__(rows, config.name, split)
        self.config, self.tokenizer, self.first_token = config, tokenizer, None
        if isinstance(model, EncoderDecoderConfig):
            self.first_token = tokenizer.role(model.start_role)
        self.is_encoder_decoder = self.first_token is not None
        self.template = FormatTemplate.of(
            text_format(model.text_format, tokenizer), 1 if self.is_encoder_decoder else 2
        )
        source_capacity, self.target_capacity = self._capacities(pair_format)
        self.sources, self.truncated = self.encode_sources(source_capacity)
        self.source_lengths = np.minimum(self.sources.lengths, source_capacity)
        # The last utterances of a dialogue matter most to the reply.
        removed_E = self.sources.lengths - self.source_lengths
        self.source_starts = removed_E if config.turns is not None else np.zeros_like(removed_E)
        self.targets, self.target_lengths = None, np.zeros(len(rows), dtype=np.int64)
        self.truncated_targets = 0
        if rows.labels is not None:
            self.targets = EncodedTexts.of([targets[0] for targets in rows.labels], tokenizer)
            self.target_lengths = np.minimum(self.targets.lengths, self.target_capacity)
            self.truncated_targets = int(np.sum(self.targets.lengths > self.target_capacity))
        special_count = self.template.special_count * (2 if self.is_encoder_decoder and self.targets is not None else 1)
        row_E = np.arange(len(rows))
        lengths_E = self.source_lengths + self.target_lengths + special_count
        self._plan = self.build_plan(lengths_E, row=row_E, part=np.zeros_like(row_E))

    def _capacities(self, pair_format: PairFormat) -> tuple[int, int]:
        special_count, max_target = self.template.special_count, self.config.target_tokens
        if self.is_encoder_decoder:
            source = pair_format.max_length - special_count
            target = min(max_target, pair_format.longest_target) - special_count
        else:
            source, target = pair_format.max_length - special_count - max_target, max_target
        if source < 1 or target < 1:
            raise UserError(
                f"max_length={pair_format.max_length} and task.target_tokens={max_target} leave no room for a source",
                f"set max_length={2 * max_target + special_count}, or a smaller task.target_tokens=",
            )
        return source, target

    def encode_sources(self, capacity: int) -> tuple[EncodedTexts, int]:
        """Returns the encoded sources, and the number of sources with more than `capacity` tokens."""
        (texts,) = self.rows.columns.values()
        sources = EncodedTexts.of([self.config.prefix + text for text in texts], self.tokenizer)
        return sources, int(np.sum(sources.lengths > capacity))

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the tokens that a model reads for each of these rows before it writes the target."""
        rows_N = np.asarray(numbers, dtype=np.int64)
        inputs = self._inputs(rows_N)
        return [ids.tolist() for ids in inputs.tokens.split(list(inputs.lengths))]

    def _source_ids(self, rows_N: np.ndarray) -> np.ndarray:
        return self.sources.read(rows_N, self.source_lengths[rows_N], self.source_starts[rows_N])

    def _inputs(self, rows_N: np.ndarray) -> Packed:
        lengths = self.source_lengths[rows_N]
        template = self.template if self.is_encoder_decoder else FormatTemplate(self.template.pieces[:2], {}, {})
        return assemble(template, [(self._source_ids(rows_N), lengths)]).packed()

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        rows_N = rows["row"]
        if self.targets is None:
            return self.batch_of(self._inputs(rows_N), None, rows, examples)
        lengths = self.target_lengths[rows_N]
        target_ids = self.targets.read(rows_N, lengths)
        if self.first_token is not None:
            target_texts = assemble(self.template, [(target_ids, lengths)]).packed()
            target = Target(target_texts.tokens, at=torch.arange(len(target_texts.tokens)), side="outputs")
            return self.batch_of(
                self._inputs(rows_N), target, rows, examples, shift_right(target_texts, self.first_token)
            )
        source_lengths = self.source_lengths[rows_N]
        texts = [(self._source_ids(rows_N), source_lengths), (target_ids, lengths)]
        arrays = assemble(self.template, texts)
        prefix_lengths = source_lengths + len(self.template.pieces[0]) + len(self.template.pieces[1])
        predicted_counts = arrays.lengths - prefix_lengths
        indices = ragged_ranges(np.cumsum(arrays.lengths) - predicted_counts - 1, predicted_counts)
        packed = arrays.packed()
        if self.config.mask == "prefix":
            packed = replace(packed, prefixes=tuple(prefix_lengths.tolist()))
        target = Target(torch.from_numpy(arrays.tokens[indices + 1]), at=torch.from_numpy(indices))
        return self.batch_of(packed, target, rows, examples)

    def metadata(self) -> JsonObject:
        """Adds counts of truncated sources and targets."""
        metadata = {
            **super().metadata(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self._plan),
            "truncated_targets": self.truncated_targets,
        }
        if self.truncated_targets:
            fraction = self.truncated_targets / len(self._plan)
            metadata["warnings"] = [
                f"{self.truncated_targets:,} {self.split} targets ({fraction:.1%}) are truncated to "
                f"{self.target_capacity} tokens: set a larger task.target_tokens="
            ]
        return metadata


class TextPairInspector(TaskInspector):
    """Inspects sources and targets, whose labels are tokens."""

    def check_plan(self, stats: RunningStatistics) -> None:
        """Notes the fraction of truncated sources. It cannot be inferred from lengths: a truncated source may be
        shorter than max_length, because its target takes part of the capacity."""
        metadata = self.examples.metadata()
        stats.report("truncated fraction", metadata["truncated"], metadata["examples"])

    def label(self, value: Label, of_token: bool) -> object:
        return Inspector.label(self, value, of_token)


def first_predictions(packed: Packed, at_M: Tensor) -> Tensor:
    """Returns (N,): the first predicting position of each document. at_M: the flat indices of all predicting
    positions."""
    ends_N = torch.full((len(packed.lengths),), len(packed.tokens))
    return ends_N.scatter_reduce(0, packed.documents[at_M], at_M, "amin")


class TextLearner(TaskLearner):
    """Learns to write targets. The single loss term is the cross entropy of all target tokens, including the end
    token."""

    inspector_class = TextPairInspector

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        # The pretrained head, if any: a target is text like any other.
        self.add_head("lm", lm_head(backbone))

    @property
    @abstractmethod
    def seq2seq_config(self) -> Seq2SeqConfig:
        """How texts are read, learned and generated."""

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads["lm"])

    @property
    def longest_target(self) -> int:
        """The maximum number of tokens of a target that the backbone supports."""
        backbone = self.backbone
        return backbone.longest_answer if isinstance(backbone, EncoderDecoder) else backbone.longest_text

    def pair_format(self, max_length: int) -> PairFormat:
        """Returns how pairs become batches of this backbone."""
        return PairFormat(self.seq2seq_config, self.tokenizer, self.backbone.config, max_length, self.longest_target)

    def pairs(self, rows: Rows) -> Rows:
        """Returns the rows of a source and its targets."""
        return rows

    def examples(self, data: SplitData, max_length: int) -> TextPairs:
        return TextPairs(self.pair_format(max_length), self.pairs(self.rows(data)), data.split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (M, H): hidden states at the predicting positions."""
        read_M = indices_of(batch, self.term) if batch.outputs is None else None
        return self.hidden_of(batch, self.dropout_rng(batch, step), read_M)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        truth = truth_probability(self.seq2seq_config.scheduled_sampling, step)
        if self.training and truth < 1.0:
            batch = self._with_predictions(batch, step, truth)
        return super().forward(batch, step)

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._lm.loss_sum(outputs, self.table_VW, self.labels(batch), self.seq2seq_config.label_smoothing)

    @torch.no_grad()
    def _with_predictions(self, batch: Batch, step: int, truth: float) -> Batch:
        """truth: the probability of keeping the true token."""
        host = batch.host
        packed = host.inputs if host.outputs is None else host.outputs
        # Target token m is read one position after the one that predicts it, unless it is the text's last one.
        at_M = indices_of(host, self.term)
        documents_M = packed.documents[at_M]
        ends_N = torch.tensor([start + length for start, length in zip(packed.starts, packed.lengths, strict=True)])
        is_read_M = at_M + 1 < ends_N[documents_M]
        uniform = random_streams.uniform_at(
            self.seed, "sample", step, host.examples[documents_M].numpy(), packed.positions[at_M].numpy()
        )
        is_replaced_M = is_read_M & (torch.from_numpy(uniform) >= truth)
        side = batch.inputs if batch.outputs is None else batch.outputs
        tokens_T, device = side.tokens.clone(), side.tokens.device
        self.eval()
        try:
            if self.seq2seq_config.scheduled_sampling.predictions == "step_by_step":
                is_replaced_T = torch.zeros(len(tokens_T), dtype=torch.bool)
                is_replaced_T[at_M[is_replaced_M] + 1] = True
                tokens_T = send(self._predicted_step_by_step(host, packed, is_replaced_T), device)
            else:
                _, best_M = self._lm.scores(self.outputs(batch, step), self.table_VW, self.labels(batch))
                replaced = send(is_replaced_M.nonzero()[:, 0], device)
                tokens_T[send(at_M, device)[replaced] + 1] = best_M[replaced]
        finally:
            self.train()
        replaced_side = replace(side, tokens=tokens_T)
        return replace(batch, inputs=replaced_side) if batch.outputs is None else replace(batch, outputs=replaced_side)

    def _predicted_step_by_step(self, host: Batch, packed: Packed, is_replaced_T: Tensor) -> Tensor:
        first_N = first_predictions(packed, indices_of(host, self.term))
        prefix_lengths = [int(first) + 1 - start for first, start in zip(first_N, packed.starts, strict=True)]
        texts, flags_of_texts = packed.tokens.split(packed.lengths), is_replaced_T.split(packed.lengths)
        starts = [text[:count].tolist() for text, count in zip(texts, prefix_lengths, strict=True)]
        remaining = [text[count:].tolist() for text, count in zip(texts, prefix_lengths, strict=True)]
        rows, longest = self.backbone.config.vocab_size, max(packed.lengths)
        decoding: Decoding
        if isinstance(self.backbone, EncoderDecoder):
            inputs = [text.tolist() for text in host.inputs.tokens.split(host.inputs.lengths)]
            decoding = EncoderDecoderDecoding(self.backbone, self._lm, rows, inputs, starts[0][0], longest)
        else:
            assert isinstance(self.backbone, Decoder)
            decoding = ContinuationDecoding(self.backbone, self._lm, rows, starts, longest, bool(packed.prefixes))
        replaced = [flags[count:].tolist() for flags, count in zip(flags_of_texts, prefix_lengths, strict=True)]
        read = read_step_by_step(decoding, remaining, replaced)
        return torch.tensor([token for pair in zip(starts, read, strict=True) for part in pair for token in part])

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        side = batch.inputs if batch.outputs is None else batch.outputs
        labels = self.labels(batch)
        losses, best = self._lm.scores(outputs, self.table_VW, labels)
        return Scores(losses, labels, best, side.documents[indices_of(batch, self.term)])

    def predictors(self, train: SplitData, examples: TextPairs) -> dict[str, ConstantPredictor]:
        """Returns the unigram distribution of the training targets, including the special tokens around them."""
        assert examples.targets is not None
        counts = token_counts(examples.targets.ids, self.tokenizer.vocab_size)
        pieces = examples.template.pieces
        for token in np.concatenate(pieces) if examples.is_encoder_decoder else pieces[-1]:
            counts[token] += len(examples.rows)
        return {self.term: ConstantPredictor.of_counts("unigram", counts)}

    def label_of(self, text: str) -> object:
        """Returns the label that a generated text represents: the only target of a row; None if it is empty."""
        return (text,) if text.strip() else None

    def responder(self) -> TextTaskResponder:
        return TextTaskResponder(self)

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        return []  # see predictions.jsonl

    def writer(self) -> Writer:
        """Returns a writer that reads sources as in training."""
        section = {"prefix": self.seq2seq_config.prefix, "mask": self.seq2seq_config.mask}
        return writer_of(self.backbone, self._lm, self.tokenizer, section)


class TextTaskResponder(TaskResponder):
    """Writes a text for each row."""

    learner: TextLearner

    @property
    def generation(self) -> GenerationConfig:  # type: ignore[override]
        """The settings for generating a text per row."""
        return self.learner.seq2seq_config.generation

    def label_of(self, text: str) -> object:
        return self.learner.label_of(text)
