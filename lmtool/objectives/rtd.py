"""Replaced-token detection: a generator fills masks, and the model detects which tokens are not the original ones."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool import random_streams
from lmtool.config.saved import JsonObject
from lmtool.data.examples import SplitData
from lmtool.data.formats import PackedArrays
from lmtool.learners.baseline import BestConstant, ConstantPredictor
from lmtool.learners.metrics import Metric
from lmtool.learners.model import indices_of, labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import CopyGate, MaskedLMHead, ReplacedTokenHead, copy_best, copy_losses, masked_lm_head
from lmtool.nn.dropout import DropoutRng, rng_at
from lmtool.objectives.checks.masking import GeneratorInspector
from lmtool.objectives.clm import unigram
from lmtool.objectives.configs import RtdConfig, RtdVariant
from lmtool.objectives.corruption.masking import Masked
from lmtool.objectives.examples.masked import MaskedWindows, TokenMasks
from lmtool.objectives.filling import MaskFiller
from lmtool.objectives.generator import Sampled, build_generator, sample_tokens, start_from_generator
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target, send

# Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020.
# The generator learns from its masks only: no gradient passes through its samples. Subclasses define what the model
# learns.
# Shape letters: T tokens, M positions, H hidden width, G of the generator, V vocabulary, W width of its table.


@dataclass(frozen=True)
class Read:
    """The model's forward over a batch. original, filled: (T,) tokens before and after the generator. at: (M,) flat
    positions of the model's term; hidden_MH: its states there."""

    original: Tensor
    filled: Tensor
    at: Tensor
    hidden_MH: Tensor


class GeneratedTextLearner(MaskFiller):
    """Terms `mlm` of the generator, and `term` of the model."""

    makes_inputs = True
    objective: nn.ModuleDict
    term: ClassVar[str]

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.objective = build_generator(config, backbone, seed)
        self.weights = {"mlm": 1.0, self.term: 1.0}

    # Defined by each variant.

    @abstractmethod
    def places(self, batch: Batch) -> Tensor:
        """(M,) flat positions of the model's term."""

    @abstractmethod
    def predictor(self, unigrams: ConstantPredictor) -> ConstantPredictor | BestConstant:
        """The best constant prediction of the model's term. unigrams: of the training text."""

    @abstractmethod
    def loss_sum(self, read: Read) -> Tensor:
        """The sum of the losses of the model's term."""

    @abstractmethod
    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        """(M,) losses, labels and best predictions of the model's term, in evaluation."""

    # Shared by all variants.

    def examples(self, data: SplitData, max_length: int) -> MaskedWindows:
        return self.masked_examples(MaskedWindows, data, max_length)

    def inspector(self, examples: MaskedWindows, max_length: int) -> GeneratorInspector:
        return GeneratorInspector(self, examples, max_length)

    def predictors(self, train: SplitData, examples: MaskedWindows) -> dict[str, ConstantPredictor | BestConstant]:
        """Unigrams without special tokens for the generator."""
        unigrams = unigram(train, self.tokenizer)
        return {"mlm": unigrams, self.term: self.predictor(unigrams)}

    def on_step(self, step: int) -> None:
        """Under training=two_stage, copies the generator's weights at the model's first step."""
        super().on_step(step)
        if self.config.training == "two_stage" and step == self.config.generator_steps + 1:
            start_from_generator(self.backbone, self.generator)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"mlm": float(len(labels_of(batch, "mlm"))), self.term: float(len(self.places(batch)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        rng = self.dropout_rng(batch, step)
        two_stage, first = self.config.training == "two_stage", step <= self.config.generator_steps
        frozen = two_stage and not first
        sums = {}
        with torch.no_grad() if frozen else nullcontext():
            hidden_MG = self._generator_hidden(batch, None if frozen else rng)
            if not frozen:
                sums["mlm"] = self._generator_head.loss_sum(hidden_MG, self._generator_table, labels_of(batch, "mlm"))
        if not (two_stage and first):
            # A separate forward: the shared embedding resamples its dropout.
            read = self.read(batch, self.filled(batch, hidden_MG, step), rng_at(rng, 1))
            sums[self.term] = self.loss_sum(read)
        return StepOutput(sums, self.weights)

    def original(self, batch: Batch) -> Tensor:
        """(T,) the original text."""
        return batch.inputs.tokens.index_copy(0, indices_of(batch, "mlm"), labels_of(batch, "mlm"))

    @torch.no_grad()
    def sampled(self, batch: Batch, step: int) -> Sampled:
        """The model's inputs for a batch in a step, without dropout, and the probabilities they were sampled from."""
        hidden_MG = self._generator_hidden(batch, None)
        filled = self.filled(batch, hidden_MG, step)
        return Sampled.of(
            filled, self._generator_head, hidden_MG, self._generator_table, filled.tokens[indices_of(batch, "mlm")],
            labels_of(batch, "mlm"), self.tokenizer.vocab_size,
        )  # fmt: skip

    def filled(self, batch: Batch, hidden_MG: Tensor, step: int) -> Packed:
        """The text with the generator's samples at the masked positions; random numbers are keyed by (seed, step,
        example, position). hidden_MG: the generator's states there. Without gradients."""
        inputs, at = batch.host.inputs, indices_of(batch.host, "mlm")
        documents, positions = inputs.documents[at].numpy(), inputs.positions[at].numpy()
        uniform = random_streams.uniform_at(self.seed, "sample", step, batch.examples.numpy()[documents], positions)
        sampled = sample_tokens(
            self._generator_head, hidden_MG.detach(), self._generator_table,
            send(torch.from_numpy(uniform), hidden_MG.device), self.tokenizer.vocab_size,
        )  # fmt: skip
        return replace(batch.inputs, tokens=batch.inputs.tokens.index_copy(0, indices_of(batch, "mlm"), sampled))

    def read(self, batch: Batch, filled: Packed, rng: DropoutRng | None) -> Read:
        """The model's forward over the generator's text."""
        at = self.places(batch)
        hidden_MH = self.backbone(filled, rng, read_M=at)
        return Read(self.original(batch), filled.tokens, at, hidden_MH)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each target's loss and best prediction, in evaluation; the generator's samples are those of step 0."""
        at, labels = indices_of(batch, "mlm"), labels_of(batch, "mlm")
        hidden_MG = self._generator_hidden(batch, None)
        each, best = self._generator_head.scores(hidden_MG, self._generator_table, labels)
        documents = batch.inputs.documents
        scores = {"mlm": Scores(each, labels, best, documents[at])}
        read = self.read(batch, self.filled(batch, hidden_MG, 0), None)
        return {**scores, self.term: Scores(*self.scored(read), documents[read.at])}

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

    def _generator_hidden(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """(M, G) the generator's states at the masked positions."""
        return self._generator_head.states(self.generator, batch.inputs, rng, indices_of(batch, "mlm"))

    @property
    def table_VW(self) -> Tensor:
        """The model's token table."""
        return self.backbone.embed.token.weight

    def logits_at(self, packed: Packed, at: Tensor) -> Tensor:
        hidden_MG = self._generator_head.states(self.generator, packed, read_M=at)
        return self._generator_head(hidden_MG, self._generator_table)


# L = L_MLM(generator) + 50 L_RTD(model). A sample that equals the original token counts as original. The variants are
# those of section 3.4 of the paper, each a learner over the same generator.


class DetectedMasks(TokenMasks):
    """The term `rtd` covers every token; its labels are computed in the step."""

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        return {**super().targets(whole, masked), "rtd": Target(None)}


class ReplacedTokenDetection(GeneratedTextLearner):
    """variant=electra. Class 1 of the term `rtd` is a replaced token. Only its loss is the score: the weighted sum, in
    which it counts 50 times, is not meaningful."""

    term = "rtd"
    metric = Metric("rtd_loss", smaller_is_better=True)
    masks: ClassVar[type[TokenMasks]] = DetectedMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.weights[self.term] = config.weight
        self.add_head("replaced_token", ReplacedTokenHead(backbone.hidden_size, backbone.head_activation))

    def places(self, batch: Batch) -> Tensor:
        return torch.arange(len(batch.inputs.tokens), device=batch.inputs.tokens.device)

    @property
    def replaced_share(self) -> float:
        """The expected fraction of replaced positions before evaluation: all masked ones."""
        return self.config.probability

    def predictor(self, unigrams: ConstantPredictor) -> BestConstant:
        """The fraction of replaced tokens in the evaluated text: the generator makes the labels."""
        return BestConstant("base rate", (1 - self.replaced_share, self.replaced_share))

    def loss_sum(self, read: Read) -> Tensor:
        return self.scored(read)[0].sum()

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        replaced_M = (read.filled != read.original)[read.at]
        logits_M = self.heads["replaced_token"](read.hidden_MH)
        each = F.binary_cross_entropy_with_logits(logits_M.float(), replaced_M.float(), reduction="none")
        return each, replaced_M.long(), (logits_M > 0).long()

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Adds the `sampled` piece of each position, and the probability that the model gives to `replaced` pieces."""
        samples = super().samples(batch, n)
        filled = self.filled(batch, self._generator_hidden(batch, None), 0)
        suspicion_T = self.heads["replaced_token"](self.backbone(filled)).float().sigmoid().cpu()
        tokens = filled.tokens.cpu()
        for start, sample in zip(batch.inputs.starts, samples, strict=False):
            sample["replaced"] = suspicion_T[start : start + len(sample["pieces"])].tolist()
            for position in sample["masked"]:
                position["sampled"] = self.tokenizer.pieces([int(tokens[start + position["position"]])])[0]
        return samples


class MaskedDetectedMasks(TokenMasks):
    """The term `rtd` covers the masked positions only."""

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        return {**targets, "rtd": Target(None, at=targets["mlm"].at)}


class MaskedTokenDetection(ReplacedTokenDetection):
    """variant=electra_15: detection at the masked positions only."""

    masks = MaskedDetectedMasks
    replaced_share = 0.5

    def places(self, batch: Batch) -> Tensor:
        return indices_of(batch, "mlm")


class RestoredMasks(TokenMasks):
    """The term `replace_mlm` has the generator's positions."""

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        return {**targets, "replace_mlm": targets["mlm"]}


class ReplacedTokenRestoration(GeneratedTextLearner):
    """variant=replace_mlm: predicts the original tokens at the masked positions, from a text without masks."""

    term = "replace_mlm"
    masks: ClassVar[type[TokenMasks]] = RestoredMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("masked_lm", masked_lm_head(backbone))

    @property
    def head(self) -> MaskedLMHead:
        """The head that predicts the original token."""
        return cast(MaskedLMHead, self.heads["masked_lm"])

    def places(self, batch: Batch) -> Tensor:
        return indices_of(batch, self.term)

    def predictor(self, unigrams: ConstantPredictor) -> ConstantPredictor:
        return unigrams

    def loss_sum(self, read: Read) -> Tensor:
        return self.head.loss_sum(read.hidden_MH, self.table_VW, read.original[read.at])

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        labels_M = read.original[read.at]
        each, best = self.head.scores(read.hidden_MH, self.table_VW, labels_M)
        return each, labels_M, best


class AllTokensMasks(TokenMasks):
    """The term `all_tokens_mlm` covers all maskable tokens."""

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        text = np.flatnonzero(~self.vocabulary.special[whole.tokens])
        target = Target(torch.from_numpy(whole.tokens[text]), at=torch.from_numpy(text))
        return {**super().targets(whole, masked), "all_tokens_mlm": target}


class AllTokensRestoration(ReplacedTokenRestoration):
    """variant=all_tokens_mlm: predicts the original token at every position, copied or generated, mixed by a gate."""

    term, masks = "all_tokens_mlm", AllTokensMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("copy", CopyGate(backbone.hidden_size))

    def loss_sum(self, read: Read) -> Tensor:
        return self._losses(read).sum()

    def _losses(self, read: Read) -> Tensor:
        gate_M = self.heads["copy"](read.hidden_MH)
        labels_M, copied_M = read.original[read.at], read.filled[read.at]
        return copy_losses(self.head, gate_M, read.hidden_MH, self.table_VW, copied_M, labels_M)

    def scored(self, read: Read) -> tuple[Tensor, Tensor, Tensor]:
        gate_M = self.heads["copy"](read.hidden_MH)
        best = copy_best(self.head, gate_M, read.hidden_MH, self.table_VW, read.filled[read.at])
        return self._losses(read), read.original[read.at], best


VARIANTS: dict[RtdVariant, type[GeneratedTextLearner]] = {
    "electra": ReplacedTokenDetection,
    "electra_15": MaskedTokenDetection,
    "replace_mlm": ReplacedTokenRestoration,
    "all_tokens_mlm": AllTokensRestoration,
}


def build(config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GeneratedTextLearner:
    """The learner of the configuration's variant."""
    return VARIANTS[config.variant](config, backbone, tokenizer, seed)
