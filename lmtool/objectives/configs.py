"""The configurations of pretraining objectives. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.learners.configs import ObjectiveConfig
from lmtool.models.configs import ModelConfig


class ReplacementConfig(ObjectiveConfig):
    """The base class for objectives that mask tokens: how many tokens are masked, what replaces them, and how often the
    masks change."""

    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    phase_fields: ClassVar[tuple[str, ...]] = ("probability", "mask", "random", "masking", "duplicates")

    probability: float = Field(0.15, gt=0, lt=1, description="fraction of the non-special tokens that are predicted")
    mask: float = Field(0.8, ge=0, le=1, description="fraction of the predicted tokens that are replaced by [MASK]")
    random: float = Field(
        0.1,
        ge=0,
        le=1,
        description="fraction of the predicted tokens replaced by a random token; the others stay unchanged. Sampled "
        "uniformly from the vocabulary without special tokens; it may be the original token",
    )
    masking: Literal["dynamic", "static"] = Field(
        "dynamic", description="dynamic: new masks every epoch; static: `duplicates` sets of masks, used in turn"
    )
    duplicates: int = Field(10, ge=1, description="number of mask sets under masking=static (BERT's dupe_factor)")

    @property
    def predicted_fraction(self) -> float:
        return self.probability

    def sampling_epoch(self, epoch: int) -> int:
        """Returns the epoch whose random numbers an epoch uses. With masking=static, epochs repeat after
        `duplicates`."""
        return epoch % self.duplicates if self.masking == "static" else epoch

    @model_validator(mode="after")
    def _require_replacement_fractions(self) -> ReplacementConfig:
        if self.mask + self.random > 1 + 1e-9:
            raise ValueError(f"mask={self.mask} and random={self.random} sum to more than 1")
        return self


class TokenMaskingConfig(ReplacementConfig):
    """The base class for objectives that mask single tokens or words, each independently of the others."""

    phase_fields: ClassVar[tuple[str, ...]] = (*ReplacementConfig.phase_fields, "select", "whole_word")

    select: Literal["exact", "bernoulli"] = Field(
        "exact", description="exact: round(probability x tokens) per example, at least one; bernoulli: independently"
    )
    whole_word: bool = Field(False, description="mask all subwords of a word together")


class MaskingConfig(ReplacementConfig):
    """The base class for objectives that mask texts of an encoder, which reads them as examples of its text format."""

    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    phase_fields: ClassVar[tuple[str, ...]] = (*ReplacementConfig.phase_fields, "short_window_probability")

    short_window_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="fraction of windows shortened to a random length; with pairs=none only. The random length is at "
        "least 2 tokens; for pairs of segments, set short_sequence_probability",
    )
    enhanced_decoder: bool = Field(
        False,
        description="predict masked tokens with DeBERTa's enhanced mask decoder (deberta, deberta_v3). It adds "
        "absolute positions, and applies the last layer twice",
    )

    @property
    def token_fractions(self) -> dict[str, float]:
        return {"heads.enhanced_masked_lm" if self.enhanced_decoder else "heads.masked_lm": self.probability}

    @model_validator(mode="after")
    def _require_masks_for_decoder(self) -> MaskingConfig:
        if self.enhanced_decoder and self.pairs_of_segments is not None:
            raise ValueError("enhanced_decoder=true cannot be combined with a second loss: set pairs=none")
        return self


class PairsConfig(MaskingConfig):
    """The base class for objectives over single texts, or over pairs of segments with a second loss."""

    phase_fields: ClassVar[tuple[str, ...]] = (*MaskingConfig.phase_fields, "pair_of", "short_sequence_probability")

    pairs: Literal["none", "nsp", "sop"] = Field(
        "none",
        description="nsp, sop: segment pairs, with next-sentence or sentence-order prediction. nsp: the second "
        "segment is random in half of the pairs; sop: two consecutive segments, swapped in half of the pairs; none: "
        "one segment and no second loss",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments of several sentences, or single sentences; with pairs=nsp or sop only. Segments fill the "
        "maximum length (BERT); pairs of sentences are short (RoBERTa's sentence pairs)",
    )
    short_sequence_probability: float = Field(
        0.1, ge=0, le=1, description="fraction of pairs shortened to a random length; with pairs=nsp or sop only"
    )

    @property
    def pairs_of_segments(self) -> str | None:
        return None if self.pairs == "none" else self.pairs


@component("objective", "mlm", builder="lmtool.objectives.mlm:MaskedLanguageModel")
class MlmConfig(TokenMaskingConfig, PairsConfig):
    """Masked language modeling (Devlin et al. 2019), with or without a loss over segment pairs."""

    phase_fields: ClassVar[tuple[str, ...]] = (*PairsConfig.phase_fields, *TokenMaskingConfig.phase_fields[-2:])

    name: Literal["mlm"] = Field("mlm", description="Masked language modeling.")


@component("objective", "span", builder="lmtool.objectives.mlm:SpanLanguageModel")
class SpanConfig(PairsConfig):
    """Masked language modeling with masks over spans of words and the span boundary objective (SpanBERT, Joshi et al.
    2020), or with masks over n-grams (ALBERT, Lan et al. 2020)."""

    example_model: ClassVar[str] = "spanbert"
    descriptions: ClassVar[dict[str, str]] = {
        "probability": "fraction of the non-special tokens that are masked, rounded up (section 3.1)",
        "mask": "fraction of spans that are replaced by [MASK] (section 3.1)",
        "random": "fraction of spans that are replaced by random tokens; the others stay unchanged",
        "short_window_probability": "fraction of windows shortened to a random length; none in the paper (section 4.2)",
        "pairs": "a single segment, no next-sentence loss (section 3.3); nsp and sop are also possible",
    }

    phase_fields: ClassVar[tuple[str, ...]] = (*PairsConfig.phase_fields, "lengths", "geometric", "longest", "replace")

    name: Literal["span"] = Field("span", description="Span masking.")
    lengths: Literal["geometric", "harmonic"] = Field(
        "geometric",
        description="distribution of span lengths in words: geometric (SpanBERT), or harmonic, 1/n (ALBERT). From 1 to "
        "`longest` words",
    )
    geometric: float = Field(0.2, gt=0, lt=1, description="parameter of the geometric distribution (section 3.1)")
    longest: int = Field(
        10,
        ge=1,
        le=10_000,
        description="maximum span length in words; with 10, the mean is 3.80 (section 3.1). The distribution is "
        "renormalized over the lengths from 1 to this maximum",
    )
    replace: Literal["span", "token"] = Field(
        "span", description="span: [MASK], random or unchanged is chosen once per span; token: for each token"
    )
    boundary: bool = Field(
        True, description="span boundary objective: also predict each span from its two neighbors (section 3.2)"
    )
    boundary_targets: int = Field(
        15, ge=1, le=10_000, description="maximum tokens predicted per span (max-pair-targets of the published command)"
    )
    boundary_position_size: int = Field(
        200, ge=1, le=1_000_000, description="width of the embedding of a token's position in its span (published code)"
    )

    @model_validator(mode="after")
    def _require_no_boundary_for_decoder(self) -> SpanConfig:
        if self.enhanced_decoder and self.boundary:
            raise ValueError("enhanced_decoder=true cannot be combined with a second loss: set boundary=false")
        return self

    @property
    def predicted_fraction(self) -> float:
        return self.probability * (2 if self.boundary else 1)

    @property
    def token_fractions(self) -> dict[str, float]:
        return {**super().token_fractions, "heads.span_boundary": self.probability}


RtdVariant = Literal["electra", "electra_15", "replace_mlm", "all_tokens_mlm"]


@component("objective", "rtd", builder="lmtool.objectives.rtd:build")
class RtdConfig(TokenMaskingConfig, MaskingConfig):
    """Replaced-token detection (ELECTRA, Clark et al. 2020): a small generator fills masks, and the model detects which
    tokens differ from the original text."""

    example_model: ClassVar[str] = "electra"
    descriptions: ClassVar[dict[str, str]] = {
        "probability": "fraction of the non-special tokens that are masked; 0.25 for large (table 6)",
        "short_window_probability": "published code: 0.05, never below 5 tokens (build_pretraining_dataset.py)",
    }

    phase_fields: ClassVar[tuple[str, ...]] = (*MaskingConfig.phase_fields, *TokenMaskingConfig.phase_fields[-2:])

    name: Literal["rtd"] = Field("rtd", description="Replaced-token detection.")
    mask: float = Field(
        0.85, ge=0, le=1, description="fraction of the predicted tokens replaced by [MASK] (pretrain_helpers.py)"
    )
    random: float = Field(
        0.0, ge=0, le=1, description="fraction of the predicted tokens replaced by a random token (published code: 0)"
    )
    variant: RtdVariant = Field(
        "electra",
        description="electra, or an ablation of section 3.4: electra_15, replace_mlm, all_tokens_mlm. electra: "
        "predict for every token whether it was replaced. electra_15: the same for the masked positions only. "
        "replace_mlm: predict the original tokens at the masked positions. all_tokens_mlm: predict the original token "
        "at every position, with a copy mechanism",
    )
    weight: float = Field(50.0, gt=0, description="weight of the detection loss (table 6: lambda)")
    generator_size: float = Field(
        0.25, gt=0, le=2, description="width of the generator relative to the model: 1/4, or 1/3 for base (table 6)"
    )
    generator_layers: float = Field(
        1.0, gt=0, le=4, description="layers of the generator, relative to the model (configure_pretraining.py)"
    )
    training: Literal["joint", "two_stage"] = Field(
        "joint",
        description="joint: both together; two_stage: first the generator, then the model (section 3.2). With "
        "two_stage, only the generator trains for generator_steps. Then the model starts from the generator's weights "
        "wherever shapes match, and only the model trains; no weights are shared",
    )
    generator_steps: int = Field(
        10000, ge=1, description="number of steps that train only the generator, with training=two_stage"
    )

    sharing: Literal["tied", "gdes", "none"] = Field(
        "tied",
        description="how the embeddings are shared with training=joint: tied, gdes (DeBERTa V3) or none. gdes: the "
        "model's token table is the generator's table plus a difference, and the model passes no gradients to the "
        "generator's table",
    )

    @model_validator(mode="after")
    def _require_joint_training_for_gdes(self) -> RtdConfig:
        if self.training == "two_stage" and self.sharing == "gdes":
            raise ValueError(
                "sharing=gdes shares weights, but training=two_stage does not: set sharing=tied or training=joint"
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
        """The generator computes logits twice, to predict and to sample; some variants also predict tokens with the
        model."""
        by_model = {"replace_mlm": self.probability, "all_tokens_mlm": 1.0}.get(self.variant, 0.0)
        return 2 * self.probability + by_model

    @property
    def token_fractions(self) -> dict[str, float]:
        """A fraction above 1 stands for a second forward, to sample or to recompute logits: it costs a third of a
        training step, which is a forward and a backward."""
        with_second_forward = 4 / 3
        generator = {"objective.generator": 1.0, "objective.masked_lm": self.probability * with_second_forward}
        head = {
            "electra": {"heads.replaced_token": 1.0},
            "electra_15": {"heads.replaced_token": self.probability},
            "replace_mlm": {"heads.masked_lm": self.probability},
            "all_tokens_mlm": {"heads.masked_lm": with_second_forward, "heads.copy": 1.0},
        }[self.variant]
        return generator | head


class NextTokenConfig(ObjectiveConfig):
    """The base class for objectives that predict text token by token."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="probability spread from the target over the vocabulary; Vaswani et al. 2017: 0.1"
    )

    @property
    def token_fractions(self) -> dict[str, float]:
        return {"heads.lm": self.predicted_fraction}

    def extra_training_targets(self, model: ModelConfig) -> str:
        return "special tokens (sentinels, ends)" if model.architecture == "encoder_decoder" else ""


@component("objective", "clm", builder="lmtool.objectives.clm:CausalLanguageModel")
class ClmConfig(NextTokenConfig):
    """Causal language modeling: predicts every token from the preceding tokens (GPT, GPT-2)."""

    example_model: ClassVar[str] = "gpt"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos",)
    reads_lanes: ClassVar[bool] = True
    supports_stride: ClassVar[bool] = True

    name: Literal["clm"] = Field("clm", description="Causal language modeling.")


@component("objective", "prefix_lm", builder="lmtool.objectives.sequence_to_sequence:build_prefix_lm")
class PrefixLmConfig(NextTokenConfig):
    """Prefix language modeling (Liu et al. 2018; Raffel et al. 2020, section 3.2): a text is split at a random
    position. Attention within the prefix is bidirectional, and the rest is predicted token by token."""

    example_model: ClassVar[str] = "gpt"
    architectures: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")
    prefixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos",)

    name: Literal["prefix_lm"] = Field("prefix_lm", description="Prefix language modeling.")

    @property
    def predicted_fraction(self) -> float:
        """One half, because the position of the split is uniformly distributed."""
        return 0.5


@component("objective", "mntp", builder="lmtool.objectives.mntp:MaskedNextTokens")
class MntpConfig(TokenMaskingConfig, NextTokenConfig):
    """Masked next-token prediction (BehnamGhader et al. 2024): a decoder reads a text with masks in both directions,
    and predicts each masked token from the position before it. A part of the texts is read causally, without masks
    (GPT-BERT, Charpentier and Samuel 2024), with the same head."""

    example_model: ClassVar[str] = "gpt"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    prefixes: ClassVar[bool] = True
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "mask")
    phase_fields: ClassVar[tuple[str, ...]] = (*TokenMaskingConfig.phase_fields, "longest_span")

    name: Literal["mntp"] = Field("mntp", description="Masked next-token prediction.")
    causal: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of the texts read causally, without masks, and its weight in the loss; GPT-BERT: 0.5. "
        "Chosen anew for each text and epoch, and the mean loss of masked texts has the remaining weight",
    )
    longest_span: int = Field(
        1,
        ge=1,
        le=10_000,
        description="maximum length in tokens of the spans that are masked whole; 1: single tokens; GPT-BERT: 3. The "
        "text is divided into spans of random lengths from 1 to this maximum, all equally probable, and one kind of "
        "replacement is chosen for each span. With select=exact, spans are masked until the fraction is reached",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight in training of the mean squared logarithm of the softmax's normalizer; GPT-BERT: 1e-4. It "
        "keeps logits small; held-out losses are cross entropies",
    )

    @model_validator(mode="after")
    def _require_one_kind_of_unit(self) -> MntpConfig:
        if self.whole_word and self.longest_span > 1:
            raise ValueError(
                f"whole_word=true masks words, and longest_span={self.longest_span} spans: set one of them"
            )
        return self

    @property
    def model_hint(self) -> str:
        return f"set model={self.example_model} tokenizer.special_tokens=roberta or objective=auto"

    @property
    def predicted_fraction(self) -> float:
        return self.causal + (1 - self.causal) * self.probability


@component("objective", "sequence_autoencoder", builder="lmtool.objectives.clm:SequenceAutoencoder")
class SequenceAutoencoderConfig(NextTokenConfig):
    """The sequence autoencoder (Dai and Le 2015, section 2): a recurrent model reads a text, and writes it again from
    its last state. The same weights read and write; there is no attention."""

    example_model: ClassVar[str] = "lstm"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos",)

    name: Literal["sequence_autoencoder"] = Field("sequence_autoencoder", description="The sequence autoencoder.")

    @property
    def predicted_fraction(self) -> float:
        """One half: of a text that is read and written, only the written tokens are predicted."""
        return 0.5

    @property
    def rewrites_texts(self) -> bool:
        return True

    def conflicts_with_model(self, model: ModelConfig, section: str) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, section)
        if not model.is_recurrent:
            message = f"objective={self.name} writes a text from the last state alone; model={model.name} can copy it"
            yield Problem("objective", f"{message} by attention", self.model_hint)


@component("objective", "span_corruption", builder="lmtool.objectives.sequence_to_sequence:SpanCorruption")
class SpanCorruptionConfig(NextTokenConfig):
    """T5's objective (Raffel et al. 2020, section 3.1.4): in the inputs, each span is replaced by a sentinel; the
    outputs are the sentinels, each followed by its span."""

    example_model: ClassVar[str] = "t5"
    architectures: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "sentinel")
    phase_fields: ClassVar[tuple[str, ...]] = ("density", "mean_length")

    name: Literal["span_corruption"] = Field("span_corruption", description="Span corruption.")
    density: float = Field(
        0.15, gt=0, lt=1, description="fraction of the tokens that are replaced (section 3.3.4; unsupervised.gin)"
    )
    mean_length: float = Field(
        3.0,
        ge=1,
        description="mean span length in tokens (section 3.3.4); 568 tokens give 512 input and 114 output tokens",
    )

    @property
    def predicted_fraction(self) -> float:
        """The number of output tokens divided by the number of input and output tokens."""
        outputs = self.density * (1 + 1 / self.mean_length)
        return outputs / (1 + 2 * self.density / self.mean_length)


@component("objective", "denoising", builder="lmtool.objectives.sequence_to_sequence:Denoising")
class DenoisingConfig(NextTokenConfig):
    """BART's objective (Lewis et al. 2020, section 2.2): the inputs are a text with noise, and the outputs are the
    original text. Each of the five kinds of noise has a rate, where 0 means none. They are applied in the order of the
    fields."""

    example_model: ClassVar[str] = "bart"
    architectures: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", ("mask", "sentinel"))  # eos, and either of the others
    phase_fields: ClassVar[tuple[str, ...]] = (
        "sentence_permutation",
        "text_infilling",
        "poisson_mean",
        "token_masking",
        "token_deletion",
        "document_rotation",
        "random",
    )

    name: Literal["denoising"] = Field("denoising", description="Denoising.")
    sentence_permutation: float = Field(
        1.0, ge=0, le=1, description="fraction of the sentences of a text that are shuffled (section 5.1: all)"
    )
    text_infilling: float = Field(
        0.3, ge=0, lt=1, description="fraction of the words masked in spans, one mask per span (section 5.1: 30%)"
    )
    poisson_mean: float = Field(
        3.0,
        gt=0,
        le=20,
        description="mean span length in words (section 2.2); 3.5 in the released command. Length 0 inserts a mask",
    )
    token_masking: float = Field(0.0, ge=0, lt=1, description="fraction of the tokens that are each replaced by a mask")
    token_deletion: float = Field(0.0, ge=0, lt=1, description="fraction of the tokens that are deleted")
    document_rotation: float = Field(
        0.0, ge=0, le=1, description="fraction of the texts that are rotated, so that they begin at a random token"
    )
    random: float = Field(
        0.0, ge=0, le=1, description="fraction of the masks replaced by a random token; 0.1 in the released command"
    )

    @property
    def predicted_fraction(self) -> float:
        return 0.5


@component("objective", "bilm", builder="lmtool.objectives.bilm:BidirectionalLanguageModel")
class BilmConfig(ObjectiveConfig):
    """Bidirectional language modeling (ELMo, Peters et al. 2018): predicts every word from the preceding words, and
    once more from the following words."""

    example_model: ClassVar[str] = "elmo"
    architectures: ClassVar[tuple[str, ...]] = ("bidirectional_lm",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("eos", "unk")

    name: Literal["bilm"] = Field("bilm", description="Bidirectional language modeling.")
    negatives: int | None = Field(
        8192,
        ge=1,
        description="number of sampled words in the training softmax; null: the full softmax. Words are sampled "
        "log-uniformly at each step from a vocabulary sorted by frequency, the same words for both directions. A "
        "number above the vocabulary size means the full softmax. Evaluation always uses the full softmax",
    )

    @property
    def token_fractions(self) -> dict[str, float]:
        """The head predicts each word in two directions."""
        return {"heads.lm": 2.0}


@component("objective", "plm", builder="lmtool.objectives.plm:PermutationLanguageModel")
class PlmConfig(ObjectiveConfig):
    """Permutation language modeling (XLNet, Yang et al. 2019): some tokens are predicted, in a random order. Each is
    predicted from the predicted tokens before it in this order, and from all tokens that are not predicted."""

    example_model: ClassVar[str] = "xlnet"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    roles: ClassVar[tuple[str | tuple[str, ...], ...]] = ("sep", "mask")
    query_stream: ClassVar[bool] = True
    phase_fields: ClassVar[tuple[str, ...]] = ("context", "longest", "reuse")
    reads_lanes: ClassVar[bool] = True
    short_window_probability: ClassVar[float] = 0.0
    """Always 0: windows of running text are not shortened; pairs are, by `short_sequence_probability`."""
    label_smoothing: ClassVar[float] = 0.0

    name: Literal["plm"] = Field("plm", description="Permutation language modeling.")
    context: int = Field(
        6,
        ge=2,
        le=1000,
        description="one in this many tokens is predicted: a span of n tokens within each n * context tokens",
    )
    longest: int = Field(
        5,
        ge=1,
        le=1000,
        description="maximum tokens of a predicted span; the probability of length n is proportional to 1/n",
    )
    reuse: int = Field(
        0,
        ge=0,
        le=100_000_000,
        description="number of tokens at the start that are permuted separately and do not attend to the rest. The "
        "other tokens attend to all of them. With model.memory_length, their states are cached for the next example, "
        "which begins right after them (XLNet: 256 of 512). 0: one permutation for all tokens",
    )
    pairs: Literal["none", "unscored"] = Field(
        "none",
        description="none: one text; unscored: two segments, the second one random in half of the pairs. As in "
        "next-sentence prediction, but without its loss; reuse must be 0",
    )
    pair_of: Literal["segments", "sentences"] = Field(
        "segments",
        description="segments of several sentences, or single sentences; with pairs=unscored only",
    )
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="fraction of pairs shortened to a random length; with pairs=unscored only",
    )

    @property
    def pairs_of_segments(self) -> str | None:
        return None if self.pairs == "none" else self.pairs

    @property
    def reuses_nothing(self) -> bool:
        return self.reuse == 0

    @property
    def predicted_fraction(self) -> float:
        return 1 / self.context

    @property
    def token_fractions(self) -> dict[str, float]:
        return {"heads.lm": self.predicted_fraction}

    def sampling_epoch(self, epoch: int) -> int:
        """Returns the epoch whose random numbers an epoch uses: always the epoch itself, since masks are never
        static."""
        return epoch

    @model_validator(mode="after")
    def _require_running_text_for_reuse(self) -> PlmConfig:
        if self.pairs != "none" and self.reuse:
            raise ValueError(f"reuse={self.reuse} needs running text: set pairs=none, or reuse=0")
        return self


@component("objective", "skip_gram", builder="lmtool.objectives.skip_gram:SkipGram")
class SkipGramConfig(ObjectiveConfig):
    """Skip-gram with negative sampling (word2vec, Mikolov et al. 2013): the vector of a word distinguishes the words
    around it from random words."""

    example_model: ClassVar[str] = "word_vectors"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    phase_fields: ClassVar[tuple[str, ...]] = ("window", "subsample")

    name: Literal["skip_gram"] = Field("skip_gram", description="Skip-gram with negative sampling.")
    window: int = Field(
        5,
        ge=1,
        le=1000,
        description="maximum context words on either side; the number for each word is random, from 1 to this maximum",
    )
    negatives: int = Field(
        5,
        ge=1,
        le=1000,
        description="negative samples per predicted word; the paper: 5 to 20 for small texts, 2 to 5 for large ones",
    )
    subsample: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="a word of frequency f is retained with probability sqrt(subsample / f); paper: 1e-5",
    )
    power: float = Field(
        0.75, ge=0, le=1, description="negatives are sampled in proportion to the count of a word to this power"
    )

    @property
    def predicted_fraction(self) -> float:
        """The mean number of predicted context words per word, without subsampling: (window + 1) / 2 on each side."""
        return self.window + 1.0

    @property
    def token_fractions(self) -> dict[str, float]:
        """The head scores the pairs of a word with its context words, and with their negatives."""
        return {"heads.skip_gram": self.predicted_fraction * (1 + self.negatives)}


@component("objective", "glove", builder="lmtool.objectives.glove:Glove")
class GloveConfig(ObjectiveConfig):
    """GloVe (Pennington et al. 2014): the vectors of two words predict how often the words occur together."""

    example_model: ClassVar[str] = "word_vectors"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    contextual: ClassVar[bool] = False
    counts_one_text: ClassVar[bool] = True

    name: Literal["glove"] = Field("glove", description="GloVe.")
    window: int = Field(
        10, ge=1, le=1000, description="maximum distance of words that occur together; distance d counts 1 / d"
    )
    cap: float = Field(100.0, gt=0, description="count from which a pair has the full weight, 1")
    power: float = Field(0.75, ge=0, le=1, description="pairs of smaller counts have the weight (count / cap) ** power")

    @property
    def predicted_fraction(self) -> float:
        """An example is a pair of tokens with one count."""
        return 0.5

    @property
    def token_fractions(self) -> dict[str, float]:
        return {"heads.glove": 0.5}
