"""What pretraining learns, as configuration. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.tables import component
from lmtool.learners.configs import ObjectiveConfig


class MaskingConfig(ObjectiveConfig):
    """What every objective with masked tokens says: how many, what stands in their place, and how often it changes."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    phase_fields: ClassVar[tuple[str, ...]] = (
        "probability", "mask", "random", "masking", "duplicates", "short_window_probability"
    )  # fmt: skip

    probability: float = Field(0.15, gt=0, lt=1, description="Share of the non-special tokens that are predicted.")
    mask: float = Field(0.8, ge=0, le=1, description="Share of the predicted tokens that are replaced by [MASK].")
    random: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the predicted tokens that are replaced by a token drawn uniformly from the vocabulary "
        "without its special tokens; it may be the same token. The rest stays as it is.",
    )
    masking: Literal["dynamic", "static"] = Field(
        "dynamic",
        description="dynamic: new masks every epoch (RoBERTa). static: `duplicates` sets of masks, repeated in turn "
        "(BERT).",
    )
    duplicates: int = Field(
        10,
        ge=1,
        description="Sets of masks (and of pairs) under masking=static; epoch e uses set e mod duplicates.",
    )
    short_window_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the windows of text that aim at a random shorter length, of 2 tokens or more; of pairs "
        "of segments short_sequence_probability says it.",
    )
    enhanced_decoder: bool = Field(
        False,
        description="Predict the masked tokens behind the enhanced mask decoder (DeBERTa): absolute positions enter "
        "there, and the last layer is applied twice.",
    )

    @property
    def predicted_fraction(self) -> float:
        return self.probability

    @property
    def places(self) -> dict[str, float]:
        return {"heads.enhanced_masked_lm" if self.enhanced_decoder else "heads.masked_lm": self.probability}

    def drawn_epoch(self, epoch: int) -> int:
        """The epoch whose draws an epoch reads."""
        return epoch % self.duplicates if self.masking == "static" else epoch

    @model_validator(mode="after")
    def _branches_fit(self) -> MaskingConfig:
        if self.mask + self.random > 1 + 1e-9:
            raise ValueError(f"mask={self.mask} and random={self.random} add up to more than 1")
        return self

    @model_validator(mode="after")
    def _decoder_is_for_masks_alone(self) -> MaskingConfig:
        if self.enhanced_decoder and self.pairs_of_segments is not None:
            raise ValueError("enhanced_decoder=true serves the masked tokens alone: give pairs=none")
        return self


class TokenMaskingConfig(MaskingConfig):
    """Masks over single tokens or words, each by itself."""

    phase_fields: ClassVar[tuple[str, ...]] = (*MaskingConfig.phase_fields, "select", "whole_word")

    select: Literal["exact", "bernoulli"] = Field(
        "exact",
        description="exact: round(probability x tokens) of each example, at least one. bernoulli: each token by "
        "itself.",
    )
    whole_word: bool = Field(False, description="Mask all pieces of a word together, within the same budget.")


class PairsConfig(MaskingConfig):
    """Masks over one run of text, or over pairs of segments with a second loss."""

    phase_fields: ClassVar[tuple[str, ...]] = (
        *MaskingConfig.phase_fields, "pair_of", "short_sequence_probability"
    )  # fmt: skip

    pairs: Literal["none", "nsp", "sop"] = Field(
        "none",
        description="nsp: two segments an example, the second random in half of them, and a second loss that tells "
        "which. sop: two consecutive segments, swapped in half of them, and the loss tells their order. none: one run "
        "of text.",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments: runs of sentences that fill the length (BERT). sentences: one sentence each, so that an "
        "example is short (RoBERTa's sentence pairs). Read with pairs=nsp or sop only.",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the pairs of segments that aim at a random shorter length; read with pairs=nsp or sop "
        "only.",
    )

    @property
    def pairs_of_segments(self) -> str | None:
        return None if self.pairs == "none" else self.pairs


@component("objective", "mlm", builder="lmtool.objectives.mlm:MaskedLanguageModel")
class MlmConfig(TokenMaskingConfig, PairsConfig):
    """Masked language modelling (Devlin et al. 2019), with or without a loss over pairs of segments."""

    phase_fields: ClassVar[tuple[str, ...]] = (*TokenMaskingConfig.phase_fields, *PairsConfig.phase_fields[-2:])

    name: Literal["mlm"] = Field("mlm", description="Masked language modelling.")


@component("objective", "span", builder="lmtool.objectives.mlm:SpanLanguageModel")
class SpanConfig(PairsConfig):
    """Masked language modelling over spans of words, with the span boundary objective (SpanBERT, Joshi et al. 2020),
    or over n-grams (ALBERT, Lan et al. 2020)."""

    phase_fields: ClassVar[tuple[str, ...]] = (
        *PairsConfig.phase_fields, "lengths", "geometric", "longest", "replace"
    )  # fmt: skip

    name: Literal["span"] = Field("span", description="Span masking.")
    lengths: Literal["geometric", "harmonic"] = Field(
        "geometric",
        description="Distribution of the spans' lengths in words, over 1 to `longest`. geometric: shares fall by "
        "1 - geometric a word. harmonic: a share of 1/n.",
    )
    geometric: float = Field(0.2, gt=0, lt=1, description="Parameter of the geometric lengths; read with these only.")
    longest: int = Field(10, ge=1, le=10_000, description="Longest span that is drawn, in words.")
    replace: Literal["span", "token"] = Field(
        "span", description="Whether [MASK], a random token or the token itself is decided for a span or each token."
    )
    boundary: bool = Field(
        True, description="The span boundary objective: a second loss that predicts a span from its two neighbours."
    )
    boundary_targets: int = Field(
        15, ge=1, le=10_000, description="Maximum tokens per span that its two neighbors predict."
    )
    boundary_position_size: int = Field(
        200, ge=1, le=1_000_000, description="Width of the vector that says which token of a span is predicted."
    )

    @model_validator(mode="after")
    def _decoder_predicts_no_boundaries(self) -> SpanConfig:
        if self.enhanced_decoder and self.boundary:
            raise ValueError("enhanced_decoder=true serves the masked tokens alone: give boundary=false")
        return self

    @property
    def predicted_fraction(self) -> float:
        return self.probability * (2 if self.boundary else 1)

    @property
    def places(self) -> dict[str, float]:
        return {**super().places, "heads.span_boundary": self.probability}


RtdVariant = Literal["electra", "electra_15", "replace_mlm", "all_tokens_mlm"]


@component("objective", "rtd", builder="lmtool.objectives.rtd:build")
class RtdConfig(TokenMaskingConfig):
    """Replaced-token detection (ELECTRA, Clark et al. 2020): a small generator fills masks, the model says which
    tokens are not the original ones."""

    name: Literal["rtd"] = Field("rtd", description="Replaced-token detection.")
    mask: float = Field(
        0.85, ge=0, le=1, description="Share of the predicted tokens that are replaced by [MASK] for the generator."
    )
    random: float = Field(
        0.0, ge=0, le=1, description="Share of the predicted tokens that are replaced by a random token for it."
    )
    variant: RtdVariant = Field(
        "electra",
        description="What the model learns from the generator's text. electra: at every token, whether it was "
        "replaced. electra_15: that at the masked places alone. replace_mlm: the original tokens at the masked "
        "places. all_tokens_mlm: the original token at every place, with a copy gate.",
    )
    weight: float = Field(
        50.0, gt=0, description="Weight of the detection loss beside the generator's; of electra and electra_15 only."
    )
    generator_size: float = Field(
        0.25, gt=0, le=2, description="Width, heads and feed-forward width of the generator, as a share of the model's."
    )
    generator_layers: float = Field(1.0, gt=0, le=4, description="Layers of the generator, as a share of the model's.")
    training: Literal["joint", "two_stage"] = Field(
        "joint",
        description="joint: both networks at once. two_stage: the generator alone for "
        "`generator_steps`, then the model, which starts from the generator's weights wherever the shapes allow; "
        "nothing is tied.",
    )
    generator_steps: int = Field(
        10000, ge=1, description="Steps of the generator alone under training=two_stage; the model learns after them."
    )

    sharing: Literal["tied", "gdes", "none"] = Field(
        "tied",
        description="What the two networks share of their embeddings under training=joint. tied: the same tables "
        "(ELECTRA). gdes: the model adds a table of its own to the generator's, whose gradient it does not touch "
        "(DeBERTa V3). none: nothing.",
    )

    @model_validator(mode="after")
    def _two_stages_share_nothing(self) -> RtdConfig:
        if self.training == "two_stage" and self.sharing == "gdes":
            raise ValueError(
                "sharing=gdes: under training=two_stage nothing is shared; give sharing=tied or training=joint"
            )
        return self

    @property
    def makes_inputs(self) -> bool:
        return True

    @property
    def steps_without_model(self) -> int:
        return self.generator_steps if self.training == "two_stage" else 0

    @property
    def predicted_fraction(self) -> float:
        """The generator predicts, and samples once more; its variants predict with the model too."""
        more = {"replace_mlm": self.probability, "all_tokens_mlm": 1.0}.get(self.variant, 0.0)
        return 2 * self.probability + more

    @property
    def places(self) -> dict[str, float]:
        """A forward alone, to sample or to make logits again on the way back, is a third of a pass with gradients."""
        again = 4 / 3
        generator = {"objective.generator": 1.0, "objective.masked_lm": self.probability * again}
        head = {
            "electra": {"heads.replaced_token": 1.0},
            "electra_15": {"heads.replaced_token": self.probability},
            "replace_mlm": {"heads.masked_lm": self.probability},
            "all_tokens_mlm": {"heads.masked_lm": again, "heads.copy": 1.0},
        }[self.variant]
        return generator | head


class NextTokenConfig(ObjectiveConfig):
    """What every objective that predicts text token by token says of its loss."""

    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each target that is spread over the whole vocabulary in training; evaluation has none.",
    )

    @property
    def places(self) -> dict[str, float]:
        return {"heads.lm": self.predicted_fraction}


@component("objective", "clm", builder="lmtool.objectives.clm:CausalLanguageModel")
class ClmConfig(NextTokenConfig):
    """Causal language modelling: every token from the ones before it (GPT, GPT-2)."""

    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos",)
    reads_lanes: ClassVar[bool] = True

    name: Literal["clm"] = Field("clm", description="Causal language modelling.")


@component("objective", "prefix_lm", builder="lmtool.objectives.prefix_lm:build")
class PrefixLmConfig(NextTokenConfig):
    """Prefix language modelling (Liu et al. 2018; Raffel et al. 2020, section 3.2): a text is split at a random place;
    what is before it is seen as a whole, what is behind it is predicted token by token."""

    architectures: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")
    prefixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos",)

    name: Literal["prefix_lm"] = Field("prefix_lm", description="Prefix language modelling.")

    @property
    def predicted_fraction(self) -> float:
        """The split is uniform."""
        return 0.5


@component("objective", "span_corruption", builder="lmtool.objectives.sequence_to_sequence:SpanCorruption")
class SpanCorruptionConfig(NextTokenConfig):
    """T5's objective (Raffel et al. 2020, section 3.1.4): spans are cut out and a sentinel stands for each; the outputs
    are the sentinels, each followed by its span."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "sentinel")
    phase_fields: ClassVar[tuple[str, ...]] = ("density", "mean_length")

    name: Literal["span_corruption"] = Field("span_corruption", description="Span corruption.")
    density: float = Field(0.15, gt=0, lt=1, description="Share of the tokens that are cut out.")
    mean_length: float = Field(3.0, ge=1, description="Mean span length in tokens.")

    @property
    def predicted_fraction(self) -> float:
        """Outputs, as a share of the tokens of both sides."""
        outputs = self.density * (1 + 1 / self.mean_length)
        return outputs / (1 + 2 * self.density / self.mean_length)


@component("objective", "denoising", builder="lmtool.objectives.sequence_to_sequence:Denoising")
class DenoisingConfig(NextTokenConfig):
    """BART's objective (Lewis et al. 2020, section 2.2): noise on the inputs, the text as it was for outputs. Each of
    the five noises has its share, 0 for none; they are applied in the order of the fields."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", ("mask", "sentinel"))
    phase_fields: ClassVar[tuple[str, ...]] = (
        "sentence_permutation", "text_infilling", "poisson_mean", "token_masking", "token_deletion",
        "document_rotation", "random",
    )  # fmt: skip

    name: Literal["denoising"] = Field("denoising", description="Denoising.")
    sentence_permutation: float = Field(
        1.0, ge=0, le=1, description="Share of the sentences that change places among themselves."
    )
    text_infilling: float = Field(
        0.3, ge=0, lt=1, description="Share of the words in spans, each of which becomes one mask."
    )
    poisson_mean: float = Field(
        3.0,
        gt=0,
        le=20,
        description="Mean length of these spans in words, Poisson; a span of no words is a mask put in between.",
    )
    token_masking: float = Field(0.0, ge=0, lt=1, description="Share of the tokens that become a mask each.")
    token_deletion: float = Field(0.0, ge=0, lt=1, description="Share of the tokens that are left out.")
    document_rotation: float = Field(
        0.0, ge=0, le=1, description="Share of the texts that begin at a random token, what was before it at the end."
    )
    random: float = Field(
        0.0, ge=0, le=1, description="Share of the masks in whose place a random token stands instead."
    )

    @property
    def predicted_fraction(self) -> float:
        return 0.5


# Bidirectional language modelling, as configuration. Imports no torch.


@component("objective", "bilm", builder="lmtool.objectives.bilm:BidirectionalLanguageModel")
class BilmConfig(ObjectiveConfig):
    """Bidirectional language modelling (Peters et al. 2018): every word from those before it, and from those behind
    it."""

    architectures: ClassVar[tuple[str, ...]] = ("bidirectional_lm",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "unk")

    name: Literal["bilm"] = Field("bilm", description="Bidirectional language modelling.")
    negatives: int | None = Field(
        8192,
        ge=1,
        description="Words beside the true one over which training computes its softmax, drawn log-uniformly for each "
        "step, the same for both directions; the words of the vocabulary stand in the order of their frequency. Null, "
        "or a number beyond the vocabulary: all words. Evaluation has all.",
    )

    @property
    def places(self) -> dict[str, float]:
        """Each word in two directions."""
        return {"heads.lm": 2.0}
