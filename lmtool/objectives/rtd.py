"""Replaced-token detection: a generator fills masks, the model says which tokens are not the original ones.

Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020:
L = L_MLM(generator) + 50 L_RTD(model). The generator learns from its masks alone: no gradient passes through its
samples, and a sample that is the original token counts as original. The variants are those of section 3.4.

Shape letters: T tokens, M masked places, H hidden width, G of the generator, V vocabulary, W width of its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool import streams
from lmtool.data.split import Rows, SplitData
from lmtool.heads.lm import MaskedLMHead, masked_lm_head
from lmtool.heads.replaced_token import CopyGate, ReplacedTokenHead, copy_best, copy_losses
from lmtool.learners.base import BaseLearner, Warn, silent
from lmtool.learners.baseline import BestConstant, ConstantPredictor, token_counts
from lmtool.learners.targets import labels_of, places_of
from lmtool.models.base import Backbone
from lmtool.nn.dropout import draws_at
from lmtool.objectives.configs import RtdConfig
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.objectives.filling import fill_masks, filled_line, masked_samples
from lmtool.objectives.generator import Sampled, build_generator, sample_tokens, start_from_generator
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed, Scores, StepOutput, send


class ReplacedTokenDetection(BaseLearner):
    """Terms `mlm` of the generator, and of the model `rtd` (electra, electra_15) or the variant's name. Class 1 of
    `rtd` is a replaced token."""

    makes_inputs = True

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.objective = build_generator(config, backbone, seed)
        self.detects = config.variant in ("electra", "electra_15")
        self.term = "rtd" if self.detects else config.variant
        self.weights = {"mlm": 1.0, self.term: config.weight if self.detects else 1.0}
        if self.detects:
            self.add_head("replaced_token", ReplacedTokenHead(backbone.hidden_size, backbone.head_activation))
            return
        self.add_head("masked_lm", masked_lm_head(backbone))
        if config.variant == "all_tokens_mlm":
            self.add_head("copy", CopyGate(backbone.hidden_size))

    def examples(self, data: SplitData, max_length: int) -> MaskedWindows:
        format_name = self.backbone.config.text_format
        return MaskedWindows(
            self.config, self.tokenizer, format_name, data.text, max_length, data.documents, data.split, self.seed
        )

    def predictors(self, train: SplitData, examples: MaskedWindows) -> dict[str, ConstantPredictor | BestConstant]:
        """Unigrams without special tokens; for `rtd`, whose labels the generator makes, the share of replaced tokens
        in whatever is scored. Before that all masked places count as replaced."""
        counts = token_counts(train.text.tokens, self.tokenizer.vocab_size)
        unigram = ConstantPredictor.of_counts("unigram", counts, self.tokenizer.special_ids)
        if not self.detects:
            return {"mlm": unigram, self.term: unigram}
        share = self.config.probability if self.config.variant == "electra" else 0.5
        return {"mlm": unigram, "rtd": BestConstant("base rate", (1 - share, share))}

    def on_step(self, step: int) -> None:
        """Under training=two_stage: the model's first step begins with the generator's weights."""
        super().on_step(step)
        if self.config.training == "two_stage" and step == self.config.generator_steps + 1:
            start_from_generator(self.backbone, self.generator)

    def counts(self, batch: Batch) -> dict[str, float]:
        masked = float(len(labels_of(batch, "mlm")))
        if not self.detects:
            return {"mlm": masked, self.term: float(len(labels_of(batch, self.term)))}
        return {"mlm": masked, "rtd": float(len(batch.inputs.tokens)) if self.config.variant == "electra" else masked}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        draws = self.draws(batch, step)
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        two_stage, first = self.config.training == "two_stage", step <= self.config.generator_steps
        frozen = two_stage and not first
        sums = {}
        with torch.no_grad() if frozen else nullcontext():
            hidden_MG = self.generator(batch.inputs, None if frozen else draws, read_M=at)
            if not frozen:
                sums["mlm"] = self._generator_head.loss_sum(hidden_MG, self._generator_table, labels)
        if not (two_stage and first):
            filled = self._filled(batch, hidden_MG, step)
            at = self._places(batch)
            # A forward of its own: the embedding that the two share drops anew.
            hidden_MH = self.backbone(filled, draws_at(draws, 1), read_M=at)
            sums[self.term] = self._losses(hidden_MH, at, batch, filled)[0].sum()
        return StepOutput(sums, self.weights)

    def original(self, batch: Batch) -> Tensor:
        """(T,) the text as it was."""
        return batch.inputs.tokens.index_copy(0, places_of(batch, "mlm"), labels_of(batch, "mlm"))

    @torch.no_grad()
    def sampled(self, batch: Batch, step: int) -> Sampled:
        """What the model reads of a batch in a step, without dropout, and the probabilities it was drawn with."""
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        hidden_MG = self.generator(batch.inputs, read_M=at)
        filled = self._filled(batch, hidden_MG, step)
        return Sampled.of(
            filled, self._generator_head, hidden_MG, self._generator_table, filled.tokens[at], labels,
            self.tokenizer.vocab_size,
        )  # fmt: skip

    def _filled(self, batch: Batch, hidden_MG: Tensor, step: int) -> Packed:
        """The text with the generator's samples at the masked places; draws keyed by (seed, step, example, position).
        No gradient passes."""
        inputs, at = batch.host.inputs, places_of(batch.host, "mlm")
        documents, positions = inputs.documents[at].numpy(), inputs.positions[at].numpy()
        uniform = streams.uniform_at(self.seed, "sample", step, batch.examples.numpy()[documents], positions)
        sampled = sample_tokens(
            self._generator_head, hidden_MG.detach(), self._generator_table,
            send(torch.from_numpy(uniform), hidden_MG.device), self.tokenizer.vocab_size,
        )  # fmt: skip
        return replace(batch.inputs, tokens=batch.inputs.tokens.index_copy(0, places_of(batch, "mlm"), sampled))

    def _places(self, batch: Batch) -> Tensor:
        """(M,) flat places of the model's term."""
        if self.config.variant == "electra":
            return torch.arange(len(batch.inputs.tokens), device=batch.inputs.tokens.device)
        return places_of(batch, "mlm" if self.detects else self.term)

    def _losses(self, hidden_MH: Tensor, at: Tensor, batch: Batch, filled: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Of the model's term: losses, labels and logits of its places; the logits are those of being replaced, of
        being copied, or none. hidden_MH: the states at the places `at`."""
        if not self.detects:
            labels = labels_of(batch, self.term)
            head = cast(MaskedLMHead, self.heads["masked_lm"])
            if self.config.variant == "replace_mlm":
                # Summed at once where there is a gradient; one by one in evaluation.
                if torch.is_grad_enabled():
                    return head.loss_sum(hidden_MH, self._table, labels)[None], labels, labels
                each, best = head.scores(hidden_MH, self._table, labels)
                return each, labels, best
            gate_M = self.heads["copy"](hidden_MH)
            each = copy_losses(head, gate_M, hidden_MH, self._table, filled.tokens[at], labels)
            return each, labels, gate_M
        replaced = (filled.tokens != self.original(batch))[at]
        logits_M = self.heads["replaced_token"](hidden_MH)
        each = F.binary_cross_entropy_with_logits(logits_M.float(), replaced.float(), reduction="none")
        return each, replaced.long(), logits_M

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best guess, in evaluation; the generator's samples are those of step 0."""
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        hidden_MG = self.generator(batch.inputs, read_M=at)
        each, best = self._generator_head.scores(hidden_MG, self._generator_table, labels)
        scores = {"mlm": Scores(each, labels, best, batch.inputs.documents[at])}
        filled = self._filled(batch, hidden_MG, 0)
        at = self._places(batch)
        hidden_MH = self.backbone(filled, read_M=at)
        each, labels, output = self._losses(hidden_MH, at, batch, filled)
        if self.detects:
            output = (output > 0).long()
        elif self.config.variant == "all_tokens_mlm":
            head = cast(MaskedLMHead, self.heads["masked_lm"])
            output = copy_best(head, output, hidden_MH, self._table, filled.tokens[at])
        scores[self.term] = Scores(each, labels, output, batch.inputs.documents[at])
        return scores

    @property
    def generator(self) -> Backbone:
        """The network that fills the masks."""
        return cast(Backbone, self.objective["generator"])

    @property
    def _generator_head(self) -> MaskedLMHead:
        return cast(MaskedLMHead, self.objective["masked_lm"])

    @property
    def _generator_table(self) -> Tensor:
        return self.generator.embed.token.weight

    @property
    def _table(self) -> Tensor:
        return self.backbone.embed.token.weight

    def _logits_at(self, packed: Packed, at: Tensor) -> Tensor:
        return self._generator_head(self.generator(packed, read_M=at), self._generator_table)

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        """The first n examples with their masks and the generator's guesses, see `masked_samples`; where the model
        detects, each place also has the `sampled` piece and the model's probability that it is `replaced`."""
        at, labels = places_of(batch, "mlm"), labels_of(batch, "mlm")
        samples = masked_samples(batch, at, labels, self._logits_at, self.tokenizer, n)
        if self.detects:
            filled = self._filled(batch, self.generator(batch.inputs, read_M=at), 0)
            suspicion_T = self.heads["replaced_token"](self.backbone(filled)).float().sigmoid().cpu()
            tokens = filled.tokens.cpu()
            for start, sample in zip(batch.inputs.starts, samples, strict=False):
                for place in sample["masked"]:
                    token = start + place["position"]
                    place["sampled"] = self.tokenizer.pieces([int(tokens[token])])[0]
                    place["replaced"] = float(suspicion_T[token])
        return samples

    @torch.no_grad()
    def respond(
        self, rows: Rows, max_length: int, batch_tokens: int, precision: Precision, warn: Warn = silent
    ) -> Iterator[dict[str, Any]]:
        """Fill the masks of texts with the generator, see `fill_masks`."""
        yield from fill_masks(self.backbone, self._logits_at, self.tokenizer, rows.columns["text"], precision.autocast)

    def line(self, record: dict[str, Any]) -> str:
        return filled_line(record)
