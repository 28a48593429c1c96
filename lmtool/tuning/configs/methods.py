"""Configuration of all tuning methods except adapters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.system.terminal import counted
from lmtool.training.configs import OptimizerConfig
from lmtool.tuning.configs.base import HeadInput, RegularizableConfig, TuningConfig, UnfreezableConfig, one_layer


@component("tuning", "full", builder="lmtool.tuning.partial:FullTuning")
class FullConfig(UnfreezableConfig, RegularizableConfig):
    """Full finetuning: every parameter is trained, except in the lower layers that `freeze_layers` excludes."""

    requires_transformer: ClassVar[bool] = False

    name: Literal["full"] = Field("full", description="Every parameter is trained.")
    freeze_embeddings: bool = Field(
        False, description="freeze the embeddings: tokens, positions, segments and their norm"
    )
    freeze_layers: int = Field(
        0, ge=0, description="number of frozen layers, from the first on; the encoder's before the decoder's"
    )

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        if self.freeze_layers:
            yield from self._layer_conflicts(model)
        yield from super().conflicts_with_model(model, task)

    def _layer_conflicts(self, model: ModelConfig) -> Iterator[Problem]:
        key, layers = "tuning.freeze_layers", model.num_layers + model.layers_of_decoder
        subject = f"{key}={self.freeze_layers} freezes layers of a transformer"
        if model.shares_layers:
            yield Problem(key, f"{subject}; {one_layer(model)}", f"set {key}=0")
        if not isinstance(model, TransformerConfig):
            yield Problem(key, f"{subject}; model={model.name} is not a transformer", f"set {key}=0")
        if self.freeze_layers > layers:
            message = f"{subject}; model={model.name} has {counted(layers, 'layer')}"
            yield Problem(key, message, f"set {key}={layers} at most")


_CONCATENATED_LAYERS = 4


@component("tuning", "head", builder="lmtool.tuning.partial:HeadTuning")
class HeadConfig(TuningConfig):
    """Feature extraction: the backbone is frozen, the task's head is trained."""

    requires_transformer: ClassVar[bool] = False

    name: Literal["head"] = Field(
        "head", description="Feature extraction: only the task's head is trained, and its pooler if this is new."
    )
    layers: Literal["last", "scalar_mix", "concat_last_4"] = Field(
        "last",
        description="last; scalar_mix: learned mean of all layers (ELMo); concat_last_4: last 4 concatenated. "
        "scalar_mix includes the embedding (Peters et al. 2018); concat_last_4: Devlin et al. 2019, section 5.3. With "
        "several layers the pooler is trained too",
    )

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        head = None if task is None else HeadInput(model, task)
        if head is not None and head.has_only_frozen_heads:
            message = (
                f"tuning={self.name} trains only heads; the answers of task={head.task.name} come from the language "
                f"model's head, which is the frozen token embedding of model={model.name}, so nothing would be trained"
            )
            yield Problem("tuning", message, "set tuning=last_n, tuning=lora or tuning=full")
        if self.layers != "last":
            yield from self._layer_conflicts(model, head)

    def _layer_conflicts(self, model: ModelConfig, head: HeadInput | None) -> Iterator[Problem]:
        key, setting, hint = "tuning.layers", f"tuning.layers={self.layers}", "set tuning.layers=last"
        if not model.depths:
            message = f"{setting} reads the layers of a stack; model={model.name} has no stack of layers"
            yield Problem(key, message, hint)
        if self.layers == "scalar_mix" and not model.has_uniform_width:
            message = f"{setting} mixes states of equal width; model={model.name} has states of several widths"
            yield Problem(key, message, hint)
        if head is None:
            return
        for member in head.task.member_configs():
            if member.writes_text or member.language_model_weight:
                message = f"{setting}: the language model's head of task={member.name} reads only the last layer"
                yield Problem(key, message, hint)
        if head.different_stacks is not None:
            yield Problem(key, f"{setting} reads one stack; {head.different_stacks}", hint)
        if self.layers == "concat_last_4" and head.depth < _CONCATENATED_LAYERS:
            yield Problem(key, f"{setting}: {head.depth_text}", "set tuning.layers=scalar_mix")


@component("tuning", "last_n", builder="lmtool.tuning.partial:LastLayersTuning")
class LastLayersConfig(UnfreezableConfig, RegularizableConfig):
    """The top layers and the head are trained; the layers below are frozen."""

    requires_transformer: ClassVar[bool] = False
    requires_stack: ClassVar[bool] = True

    name: Literal["last_n"] = Field("last_n", description="The top layers are trained.")
    layers: int | None = Field(
        None,
        ge=1,
        description="top layers of the stack below the head (encoder-decoders: decoder); null: a quarter. With the "
        "norm after them. A quarter is rounded up (Lee, Tang and Lin 2019); token classification uses the encoder of "
        "an encoder-decoder",
    )

    def trained_layers(self, depth: int) -> int:
        """Returns how many layers of a stack with `depth` layers are trained."""
        return -(-depth // 4) if self.layers is None else self.layers

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        if model.shares_layers:
            hint = "set tuning=full, tuning=lora or tuning=head"
            yield Problem("tuning", f"tuning=last_n trains the top layers; {one_layer(model)}", hint)
        if task is None:
            return
        head = HeadInput(model, task)
        if head.different_stacks is not None:
            message = f"tuning=last_n trains one stack; {head.different_stacks}"
            yield Problem("tuning", message, "set tuning=full or tuning=lora")
        if self.layers is not None and head.depth < self.layers:
            hint = f"set tuning.layers={head.depth} or less, or tuning=full"
            yield Problem("tuning.layers", f"tuning.layers={self.layers}: {head.depth_text}", hint)


@component("tuning", "bitfit", builder="lmtool.tuning.partial:BitFitTuning")
class BitFitConfig(UnfreezableConfig):
    """BitFit: only biases and the head are trained (Ben Zaken et al. 2022)."""

    name: Literal["bitfit"] = Field("bitfit", description="The biases of all maps and norms are trained.")

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        if not model.has_biases:
            message = f"tuning=bitfit trains biases; model={model.name} has no biases"
            yield Problem("tuning", message, "set tuning=ia3 or tuning=lora")


Projection = Literal["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_gate", "fc_out"]
"""Names of the linear maps in a layer: four in an attention, and two or three in a feed-forward part."""


@component("tuning", "lora", builder="lmtool.tuning.lora:LoraTuning")
class LoraConfig(UnfreezableConfig):
    """Low-rank adaptation (Hu et al. 2021): linear maps compute W0 x + (alpha / rank) B A x, and A and B are
    trained."""

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
    def _require_distinct(cls, projections: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(projections)) != len(projections):
            raise ValueError(f"projections={list(projections)} names a projection twice")
        return projections

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        if self.bias != "none" and not model.has_biases:
            message = f"tuning.bias={self.bias} trains biases; model={model.name} has no biases"
            yield Problem("tuning.bias", message, "set tuning.bias=none")
        if "fc_gate" in self.projections and not model.gated:
            supported = ",".join(name for name in self.projections if name != "fc_gate") or "fc_in"
            message = f"tuning.projections names fc_gate; model={model.name} has no gate in its feed-forward part"
            yield Problem("tuning.projections", message, f"set 'tuning.projections=[{supported}]'")

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        """Returns a warning if the rank exceeds the smaller dimension of an edited map, which limits the rank of the
        update."""
        model = cast(TransformerConfig, model)
        heads = {"k_proj": model.key_value_heads, "v_proj": model.key_value_heads}
        # Every map has one dimension of the hidden size; this is the other dimension.
        dimensions = {
            name: model.feedforward_size
            if name.startswith("fc_")
            else model.width_of_head * heads.get(name, model.num_heads)
            for name in self.projections
        }
        name, dimension = min(dimensions.items(), key=lambda item: item[1])
        max_rank = min(dimension, model.hidden_size)
        if self.rank <= max_rank:
            return []
        return [
            f"tuning.rank={self.rank}: an update of {name} ({model.hidden_size} x {dimension}) has at most rank "
            f"{max_rank}; tuning.rank={max_rank} is equivalent"
        ]


@component("tuning", "ia3", builder="lmtool.tuning.lora:Ia3Tuning")
class Ia3Config(UnfreezableConfig):
    """(IA)3: learned vectors rescale keys, values and feed-forward activations (Liu et al. 2022)."""

    name: Literal["ia3"] = Field(
        "ia3", description="Trains vectors that rescale keys, values and the input of the feed-forward part's last map."
    )


SMALL_RATE = 1e-2
"""A warning is given for learning rates below this one, with which soft prompts hardly change. The published rate is
0.3."""


@component("tuning", "prompt", builder="lmtool.tuning.prompt:PromptTuning")
class SoftPromptConfig(TuningConfig):
    """Soft prompts (Lester et al. 2021): trainable vectors that act as tokens in every text; the model is frozen.

    The method was published for T5. In encoder-decoders and decoders, the soft prompt precedes the text, as published.
    In an encoder, it follows the first token, whose state the classifier reads, so that this token keeps the position
    that it had in pretraining. If the root mean square of the token vectors is below 1 (T5's is above 1), the learning
    rate is multiplied by it.
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
        0.01, gt=0, description="learning rate of the heads as a multiple of that of the prompt (not published)"
    )

    @property
    def positions(self) -> int:
        return self.length

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        if self.init == "class_labels" and task is not None and not task.has_classes:
            message = f"tuning.init=class_labels: {task.kind_setting} has no labels"
            yield Problem("tuning.init", message, "set tuning.init=vocabulary")

    def warnings(self, optimizer: OptimizerConfig, model: ModelConfig) -> list[str]:
        if optimizer.lr >= SMALL_RATE:
            return []
        return [
            f"optimizer.lr={optimizer.lr:g}: soft prompts hardly change below {SMALL_RATE:g}; optimizer=auto gives "
            "the published 0.3"
        ]


@component("tuning", "prefix", builder="lmtool.tuning.prompt:PrefixTuning")
class PrefixConfig(TuningConfig):
    """Prefix tuning (Li and Liang 2021): in each layer's attention, cross-attention included, trainable keys and values
    precede those of every text; the model is frozen.

    A prefix acts like the cached keys and values of earlier tokens, so it takes up the first positions.
    """

    name: Literal["prefix"] = Field("prefix", description="Trainable keys and values before every text, in each layer.")
    length: int = Field(
        10, ge=1, le=100_000, description="prefix length in positions; published: 10, for summaries 200; AdapterHub: 30"
    )
    reparametrize: bool = Field(
        True,
        description="train the prefix through an MLP, used in training only: section 4.3. The MLP maps vectors of the "
        "model's width through a tanh layer to all keys and values",
    )
    inner_size: int = Field(
        512, ge=1, le=1_000_000, description="hidden width of the MLP; 512 as in the published code"
    )

    @property
    def positions(self) -> int:
        return self.length


@component("tuning", "ptuning", builder="lmtool.tuning.prompt:PTuning")
class PTuningConfig(TuningConfig):
    """P-tuning: soft prompts that a trainable encoder computes (Liu et al. 2021, "GPT Understands, Too"). The model is
    frozen.

    With `deep`, every layer has a prompt, and there is no encoder (Liu et al. 2022, "P-Tuning v2"): this is prefix
    tuning with reparametrize=false.
    """

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
            raise ValueError(f"encoder={self.encoder} applies only to prompts at the input; deep=true uses no encoder")
        return self
