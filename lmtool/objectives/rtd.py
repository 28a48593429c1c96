"""Replaced-token detection: a generator fills masks, and the model detects which tokens differ from the original
text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.config.registry import build as build_component
from lmtool.data.examples import SplitData
from lmtool.data.formats import PackedArrays
from lmtool.errors import UserError
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
from lmtool.nn.dropout import Dropout, DropoutRng, rng_at
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position
from lmtool.objectives.checks.masking import GeneratorInspector
from lmtool.objectives.clm import unigram
from lmtool.objectives.configs import RtdConfig, RtdVariant
from lmtool.objectives.corruption.masking import MaskedTexts
from lmtool.objectives.examples.masked import MaskedWindows, TokenMasks
from lmtool.objectives.filling import MaskFiller
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target, send

DELTA = "objective.sharing.delta"
"""The name of E_delta in a checkpoint. The model's own table is stored as the sum E_G + E_delta, from which finetuning
starts."""


class TableDelta(nn.Module):
    """The parameter E_delta (V, W), initialized with zeros."""

    def __init__(self, rows: int, width: int, device: torch.device):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(rows, width, device=device))


class DisentangledTable(nn.Module):
    """The model's token table E_G + E_delta under gradient-disentangled sharing. It has no parameters of its own.
    generator: the generator's token table, E_G. table_delta: the module of E_delta."""

    def __init__(self, generator: nn.Embedding, table_delta: TableDelta):
        super().__init__()
        # A tuple, so that PyTorch does not register these modules here: they belong to the generator and to `sharing`.
        self._tables = generator, table_delta

    @property
    def num_embeddings(self) -> int:
        return self._tables[0].num_embeddings

    @property
    def weight(self) -> Tensor:
        """The table (V, W), the sum."""
        generator, table_delta = self._tables
        return generator.weight.detach() + table_delta.delta

    def forward(self, ids_T: Tensor) -> Tensor:
        """Returns the vectors (T, W) of token ids (T,)."""
        generator, table_delta = self._tables
        return F.embedding(ids_T, generator.weight.detach()) + F.embedding(ids_T, table_delta.delta)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, _: object, strict: bool, missing: list[str], *__: object
    ) -> None:
        """A checkpoint with gdes has E_G and E_delta under their own names. From any other, the model's table becomes
        E_G, and E_delta becomes 0."""
        table_VW = state_dict.get(f"{prefix}weight")
        if table_VW is None:
            missing.append(f"{prefix}weight")
        elif DELTA not in state_dict:
            with torch.no_grad():
                self._tables[0].weight.copy_(table_VW)
                self._tables[1].delta.zero_()


# The submodules of an embedding that are shared. A projection to the hidden width is not shared.
_SHARED_MODULES = ("token", "position", "segment", "norm")
# Number of positions whose logits are in memory at a time.
_CHUNK_ROWS = 256


class MappedEmbeddings(nn.Module):
    """The model's embeddings (`shared`), projected to the generator's hidden width. embeddings: those that the
    generator would have without sharing."""

    # The interface of `Embeddings`: the generator has no virtual tokens, which only tuning methods add.
    virtual = None
    virtual_count = 0

    def __init__(self, shared: Embeddings, embeddings: Embeddings, width: int, device: torch.device):
        super().__init__()
        self.shared = shared
        self.project = nn.Linear(shared.token.weight.shape[1], width, device=device)
        # Positions that act in the attention depend on the number of heads, so they are not shared.
        self.position = shared.position if _embeds(shared.position) else embeddings.position

    @property
    def token(self) -> nn.Embedding:
        """The shared token table."""
        return self.shared.token

    @property
    def norm(self) -> nn.Module | None:
        """The shared norm."""
        return self.shared.norm

    @property
    def dropout(self) -> Dropout:
        """The dropout after the shared norm."""
        return self.shared.dropout

    def tokens(self, ids_T: Tensor) -> Tensor:
        """Returns the vectors (T, W) of token ids (T,)."""
        return self.shared.tokens(ids_T)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the inputs (T, G) of the generator's first layer, see `Embeddings.finish`."""
        return self.project(self.shared.finish(vectors_TH, packed, positions_T, rng))


def _embeds(position: nn.Module) -> bool:
    """Whether a module of positions has learned vectors that are added to the token vectors."""
    return not (isinstance(position, Position) and position.scores) and any(True for _ in position.parameters())


def build_generator(config: RtdConfig, model: Backbone, seed: int) -> nn.ModuleDict:
    """Builds the networks of the generator, which belongs to the model's family. With training=joint, embeddings are
    shared as configured. Returns the modules by name: `generator`, a backbone with a fraction of the model's widths and
    layers; `masked_lm`, its head; with sharing=gdes also `sharing`, which has E_delta."""
    generator: Backbone = build_component(model.config.scaled(config.generator_size, config.generator_layers), seed)
    device = next(model.parameters()).device
    generator.to(device)
    # Initial weights depend on the names of parameters. With the names of the model, a generator of the same size would
    # be initialized with the same weights as the model.
    generator.initialize(generator, seed, "objective.generator.")
    networks: dict[str, nn.Module] = {"generator": generator}
    if config.training == "joint" and config.sharing == "tied":
        _share_embeddings(generator, model, seed, device)
    if config.training == "joint" and config.sharing == "gdes":
        networks["sharing"] = _disentangle(generator, model, device)
    networks["masked_lm"] = masked_lm_head(generator, config.enhanced_decoder).to(device)
    model.initialize(networks["masked_lm"], seed, "objective.masked_lm.")
    return nn.ModuleDict(networks)


def _disentangle(generator: Backbone, model: Backbone, device: torch.device) -> TableDelta:
    """Replaces the model's token table by E_G + E_delta, where E_G is initialized with the model's table."""
    model_table, generator_table = model.embed.token.weight, generator.embed.token.weight
    if model_table.shape != generator_table.shape:
        raise UserError(
            f"objective.sharing=gdes needs token tables of the same width, but the generator's table has width "
            f"{generator_table.shape[1]} and the model's table has width {model_table.shape[1]}",
            "set objective.generator_size=1 (and objective.generator_layers=0.5), or objective.sharing=tied",
        )
    if not model_table.is_meta:
        with torch.no_grad():
            generator_table.copy_(model_table)
    table_delta = TableDelta(model_table.shape[0], model_table.shape[1], device)
    model.embed.token = DisentangledTable(generator.embed.token, table_delta)  # type: ignore[assignment]
    return table_delta


def _share_embeddings(generator: Backbone, model: Backbone, seed: int, device: torch.device) -> None:
    generator_embed, model_embed = generator.embed, model.embed
    if generator_embed.token.weight.shape != model_embed.token.weight.shape:
        mapped = MappedEmbeddings(model_embed, generator_embed, generator.hidden_size, device)
        generator.initialize(mapped.project, seed, "objective.generator.embed.project.")
        generator.embed = mapped  # type: ignore[assignment]
        return
    for name in _SHARED_MODULES:
        module = getattr(model_embed, name, None)
        if module is not None and (name != "position" or _embeds(module)):
            setattr(generator_embed, name, module)


def start_from_generator(model: Backbone, generator: Backbone) -> list[str]:
    """Initializes the model with the generator's weights, for two-stage training (section 3.2). Copies every tensor
    whose name and shape agree; if the generator has the size of the model, these are all tensors. Returns their
    names."""
    sources = dict(generator.named_parameters())
    copied = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sources and sources[name].shape == parameter.shape:
                parameter.copy_(sources[name])
                copied.append(name)
    return copied


@torch.no_grad()
def sample_tokens(
    head: MaskedLMHead, hidden_MG: Tensor, table_VW: Tensor, uniform_M: Tensor, vocab_size: int
) -> Tensor:
    """Samples a token (M,) for each position from the probabilities that the generator's head predicts. uniform_M: a
    random number in [0, 1) for each position. vocab_size: the number of tokens; the rows of the table after these are
    padding."""
    samples = [torch.zeros(0, dtype=torch.int64, device=hidden_MG.device)]
    for hidden, uniform in zip(hidden_MG.split(_CHUNK_ROWS), uniform_M.split(_CHUNK_ROWS), strict=True):
        samples.append(sample_from(head(hidden, table_VW)[:, :vocab_size], uniform))
    return torch.cat(samples)


def sample_from(logits_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """Samples a class (M,) from each row of logits: the first class whose cumulative probability exceeds the random
    number (inverse transform sampling)."""
    cumulative_MV = logits_MV.float().softmax(-1).cumsum(-1)
    thresholds = uniform_M.to(cumulative_MV)[:, None] * cumulative_MV[:, -1:]
    samples = torch.searchsorted(cumulative_MV, thresholds, right=True)[:, 0]
    return samples.clamp_(max=logits_MV.shape[1] - 1)


@dataclass(frozen=True)
class GeneratorSamples:
    """A text with sampled tokens, and statistics of the distributions that they were sampled from, for `lmtool
    inspect`.

    Attributes:
        filled: The text with the sampled tokens.
        replaced_probability_M: The probability that a sample differs from the original token.
        surprise_M: The negative log-probability of the sample at each masked position, in nats.
        entropy_M: The expectation of `surprise_M`, which is the entropy of the distribution.
        variance_M: The variance of `surprise_M`.
        bound: The maximum deviation of a surprise from its expectation.
    """

    filled: Packed
    replaced_probability_M: Tensor
    surprise_M: Tensor
    entropy_M: Tensor
    variance_M: Tensor
    bound: float


# Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020.
# The generator learns to predict the masked tokens only: no gradient passes through its samples.
#
# Shape letters: T tokens, M positions, H hidden width of the model, G hidden width of the generator, V vocabulary, W
# width of the token table.


@dataclass(frozen=True)
class ModelForward:
    """The model's forward over a text with the generator's samples. original, filled: (T,) the tokens of the original
    text and of the text with samples. at: (M,) the flat indices of the positions at which the model predicts.
    hidden_MH: its hidden states at these positions."""

    original: Tensor
    filled: Tensor
    at: Tensor
    hidden_MH: Tensor


class VariantMasks(TokenMasks):
    """Adds the targets of the model's term, which depends on the variant."""

    config: RtdConfig

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        targets, variant = super().targets(original, masked), self.config.variant
        if variant == "replace_mlm":
            return {**targets, "replace_mlm": targets["mlm"]}
        if variant == "all_tokens_mlm":
            indices = np.flatnonzero(~self.vocabulary.special[original.tokens])
            target = Target(torch.from_numpy(original.tokens[indices]), at=torch.from_numpy(indices))
            return {**targets, "all_tokens_mlm": target}
        # The labels are None, because they depend on the samples that the generator makes in each step.
        return {**targets, "rtd": Target(None, at=None if variant == "electra" else targets["mlm"].at)}


class GeneratedTextLearner(MaskFiller):
    """The base class of learners with a generator. The loss has the term `mlm` of the generator and one term of the
    model. term: the name of the model's term, which subclasses define. objective: the modules of the generator, see
    `build_generator`."""

    objective: nn.ModuleDict
    term: ClassVar[str]
    masks = VariantMasks
    inspector_class = GeneratorInspector

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
        sampled_M, labels_M = filled.tokens[indices_of(batch, "mlm")], labels_of(batch, "mlm")
        columns, bound = [torch.zeros(0, 4, dtype=torch.float64, device=hidden_MG.device)], 0.0
        chunks = (tensor.split(_CHUNK_ROWS) for tensor in (hidden_MG, sampled_M, labels_M))
        for hidden, sampled, labels in zip(*chunks, strict=True):
            # In double precision, because large sums are compared with narrow intervals.
            logits_MV = self._generator_head(hidden, self._generator_table)[:, : self.tokenizer.vocab_size]
            surprise_MV = -logits_MV.double().log_softmax(-1)
            probability_MV = (-surprise_MV).exp()
            entropy = (probability_MV * surprise_MV).sum(-1)
            variance = (probability_MV * (surprise_MV - entropy[:, None]) ** 2).sum(-1)
            sample_surprise, label_surprise = (surprise_MV.gather(1, ids[:, None])[:, 0] for ids in (sampled, labels))
            columns.append(torch.stack([1 - (-label_surprise).exp(), sample_surprise, entropy, variance], dim=1))
            bound = max(bound, float((surprise_MV - entropy[:, None]).abs().max()))
        replaced, surprise, entropy, variance = torch.cat(columns).unbind(1)
        return GeneratorSamples(filled, replaced, surprise, entropy, variance, bound)

    def fill_masks(self, batch: Batch, hidden_MG: Tensor, step: int) -> Packed:
        """Returns the inputs of a batch with samples from the generator in place of the masks, without gradients.
        hidden_MG: the generator's states at the masked positions. step: keys the random numbers together with the seed,
        the example and the position."""
        inputs, indices = batch.host.inputs, indices_of(batch.host, "mlm")
        documents, positions = inputs.documents[indices].numpy(), inputs.positions[indices].numpy()
        uniform = random_streams.uniform_at(self.seed, "sample", step, batch.examples.numpy()[documents], positions)
        uniform_M = send(torch.from_numpy(uniform), hidden_MG.device)
        head, table_VW = self._generator_head, self._generator_table
        sampled = sample_tokens(head, hidden_MG.detach(), table_VW, uniform_M, self.tokenizer.vocab_size)
        return replace(batch.inputs, tokens=batch.inputs.tokens.index_copy(0, indices_of(batch, "mlm"), sampled))

    def model_forward(self, batch: Batch, filled: Packed, rng: DropoutRng | None) -> ModelForward:
        """Runs the model on the text with the generator's samples."""
        indices = self.predicting_indices(batch)
        hidden_MH = self.backbone(filled, rng, read_M=indices)
        return ModelForward(self.original(batch), filled.tokens, indices, hidden_MH)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """The generator samples with the random numbers of step 0, so that evaluations can be compared."""
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
        return self._generator_head.states(self.generator, batch.inputs, rng, indices_of(batch, "mlm"))

    def logits_at(self, packed: Packed, indices: Tensor) -> Tensor:
        """Returns the logits (M, V) that the generator predicts at masked positions."""
        hidden_MG = self._generator_head.states(self.generator, packed, read_M=indices)
        return self._generator_head(hidden_MG, self._generator_table)


# The variants of section 3.4 of the paper. For variant=electra, the loss is L_MLM(generator) + 50 L_RTD(model), and a
# sample that equals the original token counts as original.


class ReplacedTokenDetection(GeneratedTextLearner):
    """Predicts whether a token was replaced: with variant=electra for every token, with variant=electra_15 at the
    masked positions. Class 1 of the term `rtd` means replaced. The metric is the loss of `rtd` alone, because a sum of
    losses in which `rtd` has the weight 50 is not meaningful."""

    term = "rtd"
    metric = Metric("rtd_loss", smaller_is_better=True)

    def __init__(self, config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights[self.term] = config.weight
        self.add_head("replaced_token", ReplacedTokenHead(backbone.hidden_size, backbone.head_activation))

    def predicting_indices(self, batch: Batch) -> Tensor:
        if self.config.variant == "electra_15":
            return indices_of(batch, "mlm")
        return torch.arange(len(batch.inputs.tokens), device=batch.inputs.tokens.device)

    def predictor(self, unigrams: ConstantPredictor) -> BestConstant:
        """Returns a constant fitted to the labels of the evaluated text, because the generator makes the labels."""
        # Assumed before an evaluation has measured it: half of the samples differ from the original tokens; of all
        # tokens, every masked one is replaced.
        replaced_fraction = 0.5 if self.config.variant == "electra_15" else self.config.probability
        return BestConstant("base rate", (1 - replaced_fraction, replaced_fraction))

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


class ReplacedTokenRestoration(GeneratedTextLearner):
    """variant=replace_mlm: predicts the original tokens at the masked positions, from the text with samples."""

    term = "replace_mlm"

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


class AllTokensRestoration(ReplacedTokenRestoration):
    """variant=all_tokens_mlm: predicts the original token at every position. A gate mixes two distributions: one copies
    the input token, the other predicts a token of the vocabulary."""

    term = "all_tokens_mlm"

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
    "electra_15": ReplacedTokenDetection,
    "replace_mlm": ReplacedTokenRestoration,
    "all_tokens_mlm": AllTokensRestoration,
}


def build(config: RtdConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> GeneratedTextLearner:
    """Builds the learner of the configured variant."""
    return VARIANTS[config.variant](config, backbone, tokenizer, seed)
