"""Replaced-token detection: a generator fills masks, and the model detects which tokens differ from the original
text."""

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
from lmtool.models.heads.lm import (
    CopyGate,
    MaskedLMHead,
    ReplacedTokenHead,
    copy_losses,
    copy_predictions,
    masked_lm_head,
)
from lmtool.nn.dropout import DropoutRng, rng_at
from lmtool.objectives.checks.masking import GeneratorInspector
from lmtool.objectives.clm import unigram
from lmtool.objectives.configs import RtdConfig, RtdVariant
from lmtool.objectives.corruption.masking import MaskedTexts
from lmtool.objectives.examples.masked import MaskedWindows, TokenMasks
from lmtool.objectives.filling import MaskFiller
from lmtool.objectives.generator import GeneratorSamples, build_generator, sample_tokens, start_from_generator
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target, send

# Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020.
# The generator learns to predict the masked tokens only: no gradient passes through its samples.
#
# Shape letters: T tokens, M positions, H hidden width of the model, G hidden width of the generator, V vocabulary, W
# width of the token table.


@dataclass(frozen=True)
class ModelForward:
    """The model's forward over a text with the generator's samples.

    Attributes:
        original: (T,) the tokens of the original text.
        filled: (T,) the tokens of the text with samples.
        at: (M,) the flat indices of the positions at which the model predicts.
        hidden_MH: The hidden states of the model at these positions.
    """

    original: Tensor
    filled: Tensor
    at: Tensor
    hidden_MH: Tensor


class GeneratedTextLearner(MaskFiller):
    """The base class of learners with a generator. The loss has the term `mlm` of the generator and one term of the
    model. term: the name of the model's term, which subclasses define. objective: the modules of the generator, see
    `build_generator`."""

    makes_inputs = True  # the generator makes the model's inputs in each step
    objective: nn.ModuleDict
    term: ClassVar[str]

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.objective = build_generator(config, backbone, seed)
        self.loss_weights = {"mlm": 1.0, self.term: 1.0}

    # Methods that each variant defines.

    @abstractmethod
    def predicting_indices(self, batch: Batch) -> Tensor:
        """Returns the flat indices (M,) of the positions at which the model predicts."""

    @abstractmethod
    def predictor(self, unigrams: ConstantPredictor) -> ConstantPredictor | BestConstant:
        """Returns the best constant predictor of the model's term. unigrams: the unigram predictor of the training
        text."""

    @abstractmethod
    def loss_sum(self, forward: ModelForward) -> Tensor:
        """Returns the sum of the losses of the model's term."""

    @abstractmethod
    def score_targets(self, forward: ModelForward) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the losses (M,), labels (M,) and best predictions (M,) of the model's term."""

    # Methods that all variants share.

    def examples(self, data: SplitData, max_length: int) -> MaskedWindows:
        return self.masked_examples(MaskedWindows, data, max_length)

    def inspector(self, examples: MaskedWindows, max_length: int) -> GeneratorInspector:
        return GeneratorInspector(self, examples, max_length)

    def predictors(self, train: SplitData, examples: MaskedWindows) -> dict[str, ConstantPredictor | BestConstant]:
        """Returns the unigram predictor without special tokens for the generator's term, and the predictor that the
        variant defines for the model's term."""
        unigrams = unigram(train, self.tokenizer)
        return {"mlm": unigrams, self.term: self.predictor(unigrams)}

    def on_step(self, step: int) -> None:
        """Copies the generator's weights to the model before the model's first step, with training=two_stage."""
        super().on_step(step)
        if self.config.training == "two_stage" and step == self.config.generator_steps + 1:
            start_from_generator(self.backbone, self.generator)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"mlm": float(len(labels_of(batch, "mlm"))), self.term: float(len(self.predicting_indices(batch)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        rng = self.dropout_rng(batch, step)
        two_stage, first_stage = self.config.training == "two_stage", step <= self.config.generator_steps
        generator_frozen = two_stage and not first_stage
        sums = {}
        with torch.no_grad() if generator_frozen else nullcontext():
            hidden_MG = self._generator_hidden(batch, None if generator_frozen else rng)
            if not generator_frozen:
                sums["mlm"] = self._generator_head.loss_sum(hidden_MG, self._generator_table, labels_of(batch, "mlm"))
        if not (two_stage and first_stage):
            # The shared embedding runs twice per step, and needs different dropout masks in the second forward.
            forward = self.model_forward(batch, self.fill_masks(batch, hidden_MG, step), rng_at(rng, 1))
            sums[self.term] = self.loss_sum(forward)
        return StepOutput(sums, self.loss_weights)

    def original(self, batch: Batch) -> Tensor:
        """Returns the tokens (T,) of the original text."""
        return batch.inputs.tokens.index_copy(0, indices_of(batch, "mlm"), labels_of(batch, "mlm"))

    @torch.no_grad()
    def generator_samples(self, batch: Batch, step: int) -> GeneratorSamples:
        """Returns the inputs of the model for a batch in a step, and statistics of the distributions that the generator
        samples from, without dropout."""
        hidden_MG = self._generator_hidden(batch, None)
        filled = self.fill_masks(batch, hidden_MG, step)
        return GeneratorSamples.from_states(
            filled, self._generator_head, hidden_MG, self._generator_table, filled.tokens[indices_of(batch, "mlm")],
            labels_of(batch, "mlm"), self.tokenizer.vocab_size,
        )  # fmt: skip

    def fill_masks(self, batch: Batch, hidden_MG: Tensor, step: int) -> Packed:
        """Returns the inputs of a batch with samples from the generator in place of the masks, without gradients.

        Args:
            batch: The batch.
            hidden_MG: The generator's states at the masked positions.
            step: The step, which keys the random numbers together with the seed, the example and the position.
        """
        inputs, indices = batch.host.inputs, indices_of(batch.host, "mlm")
        documents, positions = inputs.documents[indices].numpy(), inputs.positions[indices].numpy()
        uniform = random_streams.uniform_at(self.seed, "sample", step, batch.examples.numpy()[documents], positions)
        sampled = sample_tokens(
            self._generator_head, hidden_MG.detach(), self._generator_table,
            send(torch.from_numpy(uniform), hidden_MG.device), self.tokenizer.vocab_size,
        )  # fmt: skip
        return replace(batch.inputs, tokens=batch.inputs.tokens.index_copy(0, indices_of(batch, "mlm"), sampled))

    def model_forward(self, batch: Batch, filled: Packed, rng: DropoutRng | None) -> ModelForward:
        """Runs the model on the text with the generator's samples."""
        indices = self.predicting_indices(batch)
        hidden_MH = self.backbone(filled, rng, read_M=indices)
        return ModelForward(self.original(batch), filled.tokens, indices, hidden_MH)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each target, in evaluation mode. The generator samples with the
        random numbers of step 0, so that evaluations can be compared."""
        indices, labels = indices_of(batch, "mlm"), labels_of(batch, "mlm")
        hidden_MG = self._generator_hidden(batch, None)
        losses, best = self._generator_head.scores(hidden_MG, self._generator_table, labels)
        documents = batch.inputs.documents
        scores = {"mlm": Scores(losses, labels, best, documents[indices])}
        forward = self.model_forward(batch, self.fill_masks(batch, hidden_MG, 0), None)
        return {**scores, self.term: Scores(*self.score_targets(forward), documents[forward.at])}

    @property
    def generator(self) -> Backbone:
        """The backbone of the generator."""
        return cast(Backbone, self.objective["generator"])

    @property
    def _generator_head(self) -> MaskedLMHead:
        return cast(MaskedLMHead, self.objective["masked_lm"])

    @property
    def _generator_table(self) -> Tensor:
        return self.generator.embed.token.weight

    def _generator_hidden(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """Returns the generator's states (M, G) at the masked positions."""
        return self._generator_head.states(self.generator, batch.inputs, rng, indices_of(batch, "mlm"))

    @property
    def table_VW(self) -> Tensor:
        """The token table of the model."""
        return self.backbone.embed.token.weight

    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        """Returns the logits (M, V) that the generator predicts at masked positions."""
        hidden_MG = self._generator_head.states(self.generator, packed, read_M=indices)
        return self._generator_head(hidden_MG, self._generator_table)


# The variants of section 3.4 of the paper. For variant=electra, the loss is L_MLM(generator) + 50 L_RTD(model), and a
# sample that equals the original token counts as original.


class DetectionMasks(TokenMasks):
    """Adds the targets of the term `rtd`, all tokens. The labels are None, because they depend on the samples that the
    generator makes in each step."""

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        return {**super().targets(original, masked), "rtd": Target(None)}


class ReplacedTokenDetection(GeneratedTextLearner):
    """variant=electra: predicts for every token whether it was replaced; class 1 of the term `rtd` means replaced. The
    metric is the loss of `rtd` alone, because a sum of losses in which `rtd` has the weight 50 is not meaningful."""

    term = "rtd"
    metric = Metric("rtd_loss", smaller_is_better=True)
    masks: ClassVar[type[TokenMasks]] = DetectionMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights[self.term] = config.weight
        self.add_head("replaced_token", ReplacedTokenHead(backbone.hidden_size, backbone.head_activation))

    def predicting_indices(self, batch: Batch) -> Tensor:
        return torch.arange(len(batch.inputs.tokens), device=batch.inputs.tokens.device)

    @property
    def replaced_fraction(self) -> float:
        """The assumed fraction of replaced tokens before an evaluation has measured it, as if every masked token were
        replaced."""
        return self.config.probability

    def predictor(self, unigrams: ConstantPredictor) -> BestConstant:
        """Returns a predictor whose constant is fitted to the labels of the evaluated text, because the generator makes
        the labels."""
        return BestConstant("base rate", (1 - self.replaced_fraction, self.replaced_fraction))

    def loss_sum(self, forward: ModelForward) -> Tensor:
        return self.score_targets(forward)[0].sum()

    def score_targets(self, forward: ModelForward) -> tuple[Tensor, Tensor, Tensor]:
        replaced_M = (forward.filled != forward.original)[forward.at]
        logits_M = self.heads["replaced_token"](forward.hidden_MH)
        losses = F.binary_cross_entropy_with_logits(logits_M.float(), replaced_M.float(), reduction="none")
        return losses, replaced_M.long(), (logits_M > 0).long()

    @torch.no_grad()
    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Adds the `sampled` piece of each masked position, and `replaced`, the model's probability for each piece of
        the text that the piece was replaced."""
        samples = super().samples(batch, n)
        filled = self.fill_masks(batch, self._generator_hidden(batch, None), 0)
        probability_T = self.heads["replaced_token"](self.backbone(filled)).float().sigmoid().cpu()
        tokens = filled.tokens.cpu()
        for start, sample in zip(batch.inputs.starts, samples, strict=False):
            sample["replaced"] = probability_T[start : start + len(sample["pieces"])].tolist()
            for position in sample["masked"]:
                position["sampled"] = self.tokenizer.pieces([int(tokens[start + position["position"]])])[0]
        return samples


class MaskedPositionDetectionMasks(TokenMasks):
    """Adds the targets of the term `rtd`, the masked positions only."""

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        targets = super().targets(original, masked)
        return {**targets, "rtd": Target(None, at=targets["mlm"].at)}


class MaskedTokenDetection(ReplacedTokenDetection):
    """variant=electra_15: predicts only at the masked positions whether the token was replaced."""

    masks = MaskedPositionDetectionMasks
    # Assumed before an evaluation has measured it: half of the samples differ from the original token.
    replaced_fraction = 0.5

    def predicting_indices(self, batch: Batch) -> Tensor:
        return indices_of(batch, "mlm")


class RestorationMasks(TokenMasks):
    """Adds the targets of the term `replace_mlm`, which are those of the generator's term."""

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        targets = super().targets(original, masked)
        return {**targets, "replace_mlm": targets["mlm"]}


class ReplacedTokenRestoration(GeneratedTextLearner):
    """variant=replace_mlm: predicts the original tokens at the masked positions, from the text with samples."""

    term = "replace_mlm"
    masks: ClassVar[type[TokenMasks]] = RestorationMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("masked_lm", masked_lm_head(backbone))

    @property
    def head(self) -> MaskedLMHead:
        """The head that predicts original tokens."""
        return cast(MaskedLMHead, self.heads["masked_lm"])

    def predicting_indices(self, batch: Batch) -> Tensor:
        return indices_of(batch, self.term)

    def predictor(self, unigrams: ConstantPredictor) -> ConstantPredictor:
        return unigrams

    def loss_sum(self, forward: ModelForward) -> Tensor:
        return self.head.loss_sum(forward.hidden_MH, self.table_VW, forward.original[forward.at])

    def score_targets(self, forward: ModelForward) -> tuple[Tensor, Tensor, Tensor]:
        labels_M = forward.original[forward.at]
        losses, best = self.head.scores(forward.hidden_MH, self.table_VW, labels_M)
        return losses, labels_M, best


class AllTokensRestorationMasks(TokenMasks):
    """Adds the targets of the term `all_tokens_mlm`, all tokens that are not special."""

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        indices = np.flatnonzero(~self.vocabulary.special[original.tokens])
        target = Target(torch.from_numpy(original.tokens[indices]), at=torch.from_numpy(indices))
        return {**super().targets(original, masked), "all_tokens_mlm": target}


class AllTokensRestoration(ReplacedTokenRestoration):
    """variant=all_tokens_mlm: predicts the original token at every position. A gate mixes two distributions: one copies
    the input token, the other predicts a token of the vocabulary."""

    term, masks = "all_tokens_mlm", AllTokensRestorationMasks

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.add_head("copy", CopyGate(backbone.hidden_size))

    def loss_sum(self, forward: ModelForward) -> Tensor:
        return self._losses(forward).sum()

    def _losses(self, forward: ModelForward) -> Tensor:
        gate_M = self.heads["copy"](forward.hidden_MH)
        labels_M, copied_M = forward.original[forward.at], forward.filled[forward.at]
        return copy_losses(self.head, gate_M, forward.hidden_MH, self.table_VW, copied_M, labels_M)

    def score_targets(self, forward: ModelForward) -> tuple[Tensor, Tensor, Tensor]:
        gate_M = self.heads["copy"](forward.hidden_MH)
        best = copy_predictions(self.head, gate_M, forward.hidden_MH, self.table_VW, forward.filled[forward.at])
        return self._losses(forward), forward.original[forward.at], best


VARIANTS: dict[RtdVariant, type[GeneratedTextLearner]] = {
    "electra": ReplacedTokenDetection,
    "electra_15": MaskedTokenDetection,
    "replace_mlm": ReplacedTokenRestoration,
    "all_tokens_mlm": AllTokensRestoration,
}


def build(config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GeneratedTextLearner:
    """Builds the learner of the configured variant."""
    return VARIANTS[config.variant](config, backbone, tokenizer, seed)
