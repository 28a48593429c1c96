"""Configuration of the tuning methods except adapters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from lmtool.config.needs import Offer, Requirement
from lmtool.config.tables import component
from lmtool.learners.configs import LABELS, LearnedConfig
from lmtool.models.configs import (
    BIASES,
    GATE,
    LAYERS_OF_EACH_DEPTH,
    STACK,
    STATES_OF_ONE_WIDTH,
    TRANSFORMER,
    ModelConfig,
    TransformerConfig,
    number_of_layers,
)
from lmtool.training.configs import OptimizerConfig
from lmtool.tuning.configs.base import ONE_STACK, ByDepthConfig, HeadInput, OfPretrainedConfig, TuningConfig, depth_of


@component("tuning", "full", builder="lmtool.tuning.partial:FullTuning")
class FullConfig(ByDepthConfig, OfPretrainedConfig):
    """Every parameter is trained, except for frozen lowest layers."""

    of_transformers: ClassVar[bool] = False

    name: Literal["full"] = Field("full", description="Every parameter is trained.")
    freeze_embeddings: bool = Field(
        False, description="freeze the embeddings: tokens, positions, segments and their norm"
    )
    freeze_layers: int = Field(
        0, ge=0, description="number of frozen layers, from the first on; the encoder's before the decoder's"
    )

    def needs(self) -> Iterator[Requirement]:
        if self.freeze_layers:
            key = "tuning.freeze_layers"
            reason = f"{key}={self.freeze_layers} freezes layers of a transformer"
            yield Requirement(LAYERS_OF_EACH_DEPTH, key, reason, "set tuning.freeze_layers=0")
            yield Requirement(TRANSFORMER, key, reason, "set tuning.freeze_layers=0")
            yield Requirement(number_of_layers(self.freeze_layers), key, reason, _fewer_layers)
        yield from super().needs()


def _fewer_layers(model: ModelConfig) -> str:
    return f"set tuning.freeze_layers={model.num_layers + model.layers_of_decoder} at most"


_CONCATENATED_LAYERS = 4


@component("tuning", "head", builder="lmtool.tuning.partial:HeadTuning")
class HeadConfig(TuningConfig):
    """Feature extraction: the backbone is frozen, the task's head is trained."""

    of_transformers: ClassVar[bool] = False

    name: Literal["head"] = Field(
        "head", description="Feature extraction: only the task's head is trained, and its pooler if new."
    )
    layers: Literal["last", "scalar_mix", "concat_last_4"] = Field(
        "last",
        description="last; scalar_mix: learned mean of all layers (ELMo); concat_last_4: last 4 concatenated. "
        "scalar_mix includes the embedding (Peters et al. 2018); concat_last_4: Devlin et al. 2019, section 5.3. With "
        "several layers the pooler is trained too",
    )

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        hint = "set tuning=last_n, tuning=lora or tuning=full"
        yield Requirement(_SOMETHING_LEARNS, "tuning", f"tuning={self.name} trains only heads", hint)
        if self.layers == "last":
            return
        key, typed, hint = "tuning.layers", f"tuning.layers={self.layers}", "set tuning.layers=last"
        yield Requirement(STACK, key, f"{typed} reads the layers of a stack", hint)
        if self.layers == "scalar_mix":
            yield Requirement(STATES_OF_ONE_WIDTH, key, f"{typed} mixes states of equal width", hint)
        yield Requirement(_READS_STATES, key, typed, hint)
        yield Requirement(ONE_STACK, key, f"{typed} reads one stack", hint)
        if self.layers == "concat_last_4":
            yield Requirement(depth_of(_CONCATENATED_LAYERS), key, typed, "set tuning.layers=scalar_mix")


_SOMETHING_LEARNS: Offer[HeadInput] = Offer(
    "head_input",
    lambda head: not head.frozen_table,
    lambda head: (
        f"the answers of task={head.task.name} come from the language model's head, which is the frozen token table "
        f"of model={head.model.name}: nothing would be trained"
    ),
)


def _of_last_layer(task: LearnedConfig) -> LearnedConfig | None:
    """The first member with a language model's head."""
    return next((part for part in task.parts() if part.writes_text or part.language_model_weight), None)


_READS_STATES: Offer[LearnedConfig] = Offer(
    "task",
    lambda task: _of_last_layer(task) is None,
    lambda task: f"the language model's head of task={(_of_last_layer(task) or task).name} reads only the last layer",
    wording="{reason}: {lacking}",
)


@component("tuning", "last_n", builder="lmtool.tuning.partial:LastLayersTuning")
class LastLayersConfig(ByDepthConfig, OfPretrainedConfig):
    """The top layers and the head are trained, the layers below are frozen."""

    of_transformers: ClassVar[bool] = False
    of_stacks: ClassVar[bool] = True

    name: Literal["last_n"] = Field("last_n", description="The top layers are trained.")
    layers: int | None = Field(
        None,
        ge=1,
        description="top layers of the stack below the head (encoder-decoders: decoder); null: a quarter. With the "
        "norm after them. A quarter is rounded up (Lee, Tang and Lin 2019); token classification uses the encoder of "
        "an encoder-decoder",
    )

    def learning(self, depth: int) -> int:
        """The number of trained layers of `depth`."""
        return -(-depth // 4) if self.layers is None else self.layers

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        hint = "set tuning=full, tuning=lora or tuning=head"
        yield Requirement(LAYERS_OF_EACH_DEPTH, "tuning", "tuning=last_n trains the top layers", hint)
        yield Requirement(ONE_STACK, "tuning", "tuning=last_n trains one stack", "set tuning=full or tuning=lora")
        if self.layers is not None:
            yield Requirement(depth_of(self.layers), "tuning.layers", f"tuning.layers={self.layers}", _fewer_of_head)


def _fewer_of_head(head: HeadInput) -> str:
    return f"set tuning.layers={head.depth} or less, or tuning=full"


@component("tuning", "bitfit", builder="lmtool.tuning.partial:BitFitTuning")
class BitFitConfig(ByDepthConfig):
    """Only biases are trained (Ben Zaken et al. 2022)."""

    name: Literal["bitfit"] = Field("bitfit", description="The biases of all maps and norms are trained.")

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        yield Requirement(BIASES, "tuning", "tuning=bitfit trains biases", "set tuning=ia3 or tuning=lora")


Projection = Literal["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_gate", "fc_out"]


@component("tuning", "lora", builder="lmtool.tuning.lora:LoraTuning")
class LoraConfig(ByDepthConfig):
    """Low-rank adaptation (Hu et al. 2021): W0 x + (alpha / rank) B A x, with trainable A and B."""

    name: Literal["lora"] = Field("lora", description="Low-rank updates of the layers' linear maps are trained.")
    rank: int = Field(8, ge=1, description="rank of A (rank x inputs) and B (outputs x rank)")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="the update is scaled by alpha / rank; published for RoBERTa base: 16 with rank 8"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of A's input; published for RoBERTa: 0")
    projections: tuple[Projection, ...] = Field(
        ("q_proj", "v_proj"),
        min_length=1,
        description="in self- and cross-attention; also k_proj, out_proj, fc_in, fc_gate, fc_out",
    )
    rank_stabilised: bool = Field(False, description="true: scale by alpha / sqrt(rank) (Kalajdzievski 2023)")
    dora: bool = Field(
        False, description="true: split the updated map into direction and learned magnitude (Liu et al. 2024)"
    )
    bias: Literal["none", "lora_only", "all"] = Field(
        "none", description="none; lora_only: also train the biases of the updated maps; all: all biases of the model"
    )

    @field_validator("projections")
    @classmethod
    def _differ(cls, projections: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(projections)) != len(projections):
            raise ValueError(f"projections={list(projections)} names a map twice")
        return projections

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        if self.bias != "none":
            yield Requirement(BIASES, "tuning.bias", f"tuning.bias={self.bias} trains biases", "set tuning.bias=none")
        if "fc_gate" in self.projections:
            supported = ",".join(name for name in self.projections if name != "fc_gate") or "fc_in"
            hint = f"set 'tuning.projections=[{supported}]'"
            yield Requirement(GATE, "tuning.projections", "tuning.projections names fc_gate", hint)

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        """Warns if the rank exceeds the smaller dimension of the map."""
        model = cast(TransformerConfig, model)
        heads = {"k_proj": model.key_value_heads, "v_proj": model.key_value_heads}
        sides = {
            name: model.feedforward_size
            if name.startswith("fc_")
            else model.width_of_head * heads.get(name, model.num_heads)
            for name in self.projections
        }
        name, side = min(sides.items(), key=lambda item: item[1])
        most = min(side, model.hidden_size)
        if self.rank <= most:
            return []
        return [
            f"tuning.rank={self.rank}: an update of {name} ({model.hidden_size} x {side}) has at most rank {most}; "
            f"tuning.rank={most} is equivalent"
        ]


@component("tuning", "ia3", builder="lmtool.tuning.lora:Ia3Tuning")
class Ia3Config(ByDepthConfig):
    """Inner activations are rescaled by learned vectors (Liu et al. 2022)."""

    name: Literal["ia3"] = Field(
        "ia3", description="Trains vectors that rescale keys, values and the input of the feed-forward part's last map."
    )


SMALL_RATE = 1e-2
"""Soft prompts hardly change below this learning rate; 0.3 is published."""


@component("tuning", "prompt", builder="lmtool.tuning.prompt:PromptTuning")
class SoftPromptConfig(TuningConfig):
    """Soft prompts (Lester et al. 2021): trainable vectors that act as tokens in every text; the model is frozen.

    Published for T5, whose encoder reads them before all tokens, as decoders do here. In an encoder they follow the
    first token, whose state the classifier reads, so that it keeps its pretrained position. For token vectors smaller
    than T5's, whose root mean square is above 1, the learning rate is scaled down in proportion.
    """

    name: Literal["prompt"] = Field(
        "prompt", description="Soft prompts: trainable vectors among the tokens of every text."
    )
    length: int = Field(
        100,
        ge=1,
        le=100_000,
        description="virtual tokens per text, which use up positions; published: 100, 20 nearly as good",
    )
    init: Literal["vocabulary", "class_labels", "random"] = Field(
        "vocabulary",
        description="vocabulary: sampled from its 5,000 most frequent entries; class_labels; random. class_labels: "
        "the mean embedding of each label's words, then the vocabulary; random: uniform in [-0.5, 0.5]",
    )
    head_scale: float = Field(
        0.01, gt=0, description="learning rate of the heads as a multiple of the prompts' (published: none)"
    )

    @property
    def positions(self) -> int:
        return self.length

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        if self.init == "class_labels":
            yield Requirement(LABELS, "tuning.init", "tuning.init=class_labels", "set tuning.init=vocabulary")

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        if optimizer.lr >= SMALL_RATE:
            return []
        return [
            f"optimizer.lr={optimizer.lr:g}: soft prompts hardly change below {SMALL_RATE:g}; optimizer=auto gives "
            "the published 0.3"
        ]


@component("tuning", "prefix", builder="lmtool.tuning.prompt:PrefixTuning")
class PrefixConfig(TuningConfig):
    """Prefix tuning (Li and Liang 2021): trains keys and values before every text in each layer's attention, in an
    encoder-decoder also in its cross-attention; the model is frozen.

    A prefix acts like cached keys and values of previous tokens: it uses the first positions.
    """

    name: Literal["prefix"] = Field("prefix", description="Trainable keys and values before every text, in each layer.")
    length: int = Field(
        10, ge=1, le=100_000, description="prefix length in positions; section 5.3: 10; 200 for summaries; adapters: 30"
    )
    reparametrize: bool = Field(
        True,
        description="train the prefix through an MLP, used in training only: section 4.3. The MLP maps vectors of the "
        "model's width through a tanh layer to all keys and values",
    )
    inner_size: int = Field(512, ge=1, le=1_000_000, description="hidden width of that MLP: published code")

    @property
    def positions(self) -> int:
        return self.length


@component("tuning", "ptuning", builder="lmtool.tuning.prompt:PTuning")
class PTuningConfig(TuningConfig):
    """P-tuning: soft prompts computed by a trainable encoder (Liu et al. 2021, "GPT Understands, Too"); with `deep`,
    prompts in every layer and no encoder (Liu et al. 2022, "P-Tuning v2"), which is a prefix without a map. The model
    is frozen."""

    name: Literal["ptuning"] = Field("ptuning", description="Soft prompts with an encoder, or in every layer.")
    length: int = Field(
        20,
        ge=1,
        le=100_000,
        description="virtual tokens per text, which use up positions; v2: under 20 for classes, 100 for tags",
    )
    encoder: Literal["lstm", "mlp"] = Field(
        "lstm",
        description="encoder of the prompts, used in training only: lstm (published), or mlp. lstm: two bidirectional "
        "layers and an MLP of two linear layers; mlp: three linear layers",
    )
    deep: bool = Field(False, description="true: prompts in every layer, as keys and values, instead of at the input")

    @property
    def recipe_name(self) -> str:
        return f"{self.name}_deep" if self.deep else self.name

    @property
    def positions(self) -> int:
        return self.length

    @model_validator(mode="after")
    def _deep_prompts_have_no_encoder(self) -> PTuningConfig:
        if self.deep and self.encoder != "lstm":
            raise ValueError(f"encoder={self.encoder} applies to prompts at the input; deep=true has none")
        return self
