"""The cost model of a training step: FLOPs, memory and disk space, computed from plain numbers and a learner's modules.

A multiplication with an addition counts as two FLOPs, and a training step as three forward passes, because the backward
pass costs as much as two. A part of a learner multiplies the vector of each token that it processes with all of its
matrices. Attention adds, for each layer, the scores and the weighted sums over the attended tokens; the documents of a
packed batch do not attend to each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.costs.activations import (
    SavedActivations,
    backbones_of,
    copied_bytes,
    decoding_backbone,
    head_bytes,
    layers_of,
    lengthening,
    saved_activations,
)
from lmtool.costs.attention import VALUE_BYTES, Formats
from lmtool.costs.memory_of_run import (
    TrainingConfig,
    configuration_of_peers,
    parameters_by_block,
    parameters_by_part,
    planned_learner,
    planned_teachers,
    saved_values,
    trained_values,
    values_of,
)
from lmtool.costs.rate import PlannedDevice, StepWork, this_machine
from lmtool.data.phases import PhaseFractions
from lmtool.distillation.configs.modes import CodistillationConfig, StandardConfig
from lmtool.learners.base import BaseLearner
from lmtool.learners.rules import reads_lanes
from lmtool.models.base import Backbone, OneStack, StatefulBackbone
from lmtool.models.characters import WordCharacters
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import AdaptiveLMHead, BackboneLMHead, EnhancedMaskedLMHead, LMHead
from lmtool.models.heads.sampled import CooccurrenceHead, SampledLMHead, WordPairsHead
from lmtool.nn.attention import MultiHead
from lmtool.nn.positions import Position
from lmtool.nn.prefix import VirtualTokens
from lmtool.reporting.costs import PhasePlan, RunPlan
from lmtool.reporting.text import size
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.resolver.rules import violations
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.training.budgets import MOST_STEPS, retained_checkpoints, rows_an_interval
from lmtool.training.configs import AdafactorConfig
from lmtool.training.phases import words_of_phase
from lmtool.training.precision import Precision

# Memory of a process besides the model, by whether it uses CUDA: Python, torch, the tokenizer, the loader, and unusable
# fragments of the allocator (390 to 480 MB measured on Linux); on CUDA also its context and workspaces of libraries.
RESERVE = {False: 470_000_000, True: 1_500_000_000}
# The size of a row of metrics.jsonl, and of all other files in a run's folder except the checkpoints.
ROW_BYTES, FOLDER_BYTES = 250, 200_000


@dataclass(frozen=True)
class Work:
    """The work of one part of a learner in a training step.

    Attributes:
        fraction: The fraction of a batch's tokens that the part processes.
        values: The number of elements of its matrices; a matrix that is used twice counts twice.
        attention: The total width of the attention heads, summed over layers.
        context: The mean number of tokens that a token attends to.
        passes: The cost in forward passes: 3 with gradients, 2 if the matrices are frozen but gradients flow through
            the part, 1 without gradients.
    """

    fraction: float
    values: float
    attention: float = 0.0
    context: float = 0.0
    passes: float = 3

    @property
    def flops(self) -> float:
        """The FLOPs per token of the batch."""
        return self.passes * self.fraction * (2 * self.values + 4 * self.attention * self.context)


@dataclass(frozen=True)
class Sizes:
    """The numbers of values that a training process holds in memory, apart from activations.

    Attributes:
        parameters: The parameters of each part of the learner.
        optimizer_values: The values of the optimizer's state.
        layer_parameters: The parameters of all layers together.
        largest_layer: The parameters of the largest layer.
        teacher_parameters: The parameters of frozen teachers.
        copied_bytes: The bytes of the copies of weights that a forward pass makes.
        saved_parameters: The parameters in a checkpoint; None means all.
        carried_values: The values of the state that is carried from batch to batch.
        blocks: The parameters of the backbone's blocks, by kind.
    """

    parameters: Mapping[str, int]
    trainable_parameters: int
    optimizer_values: int
    layer_parameters: int = 0
    largest_layer: int = 0
    teacher_parameters: int = 0
    copied_bytes: int = 0
    saved_parameters: int | None = None
    carried_values: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of parameters of the learner."""
        return sum(self.parameters.values())


@dataclass(frozen=True)
class Forward:
    """One forward pass on one device. activations: those saved for the backward pass, in bytes per token. head_bytes:
    the bytes that the loss over the vocabulary needs. cuda: whether the device is a GPU."""

    tokens: float
    activations: SavedActivations = field(default_factory=SavedActivations)
    head_bytes: int = 0
    cuda: bool = False

    @property
    def activation_bytes(self) -> float:
        """The bytes that are saved for the backward pass."""
        return self.tokens * (self.activations.activations + self.activations.scores + self.activations.working)


def memory_of(sizes: Sizes, forward: Forward, devices: int = 1, sharded: bool = False) -> dict[str, int]:
    """Estimates the memory of one device at the peak of a step, as bytes by purpose ("weights", "gradients", ...),
    without purposes that need none. sharded: whether the weights, gradients and optimizer state are divided among the
    devices (fsdp). A device then temporarily also holds two complete layers, the current and the prefetched one, and
    all parameters outside of layers, with the gradients of one layer and of the parameters outside."""
    shards = devices if sharded else 1
    # The loss is computed before layers are recomputed in the backward pass, so only the larger of the two counts.
    working = forward.tokens * forward.activations.working
    outside = sizes.total - sizes.layer_parameters
    parts = {
        "weights": VALUE_BYTES * sizes.total / shards,
        "gradients": VALUE_BYTES * sizes.trainable_parameters / shards,
        "optimizer": VALUE_BYTES * sizes.optimizer_values / shards,
        "gathered weights": VALUE_BYTES * (3 * sizes.largest_layer + 2 * outside) if shards > 1 else 0,
        "weight copies": sizes.copied_bytes,
        "carried state": 2 * VALUE_BYTES * sizes.carried_values,  # before and after a step
        "activations": forward.tokens * forward.activations.activations + working,
        "attention scores": forward.tokens * forward.activations.scores,
        "logits": max(0, forward.head_bytes - working),
        "teachers": VALUE_BYTES * sizes.teacher_parameters,
        "framework": RESERVE[forward.cuda],
    }
    return {name: round(size) for name, size in parts.items() if size}


@dataclass(frozen=True)
class StepCosts:
    """The costs of a training step. works: those of each part of the learner. tokens: the mean number of real tokens in
    a step, over all devices. sizes: the values that a process holds. forward: that of one device. sharded: see
    `memory_of`."""

    works: Sequence[Work]
    tokens: float
    sizes: Sizes
    forward: Forward
    devices: int = 1
    sharded: bool = False

    def plan(self) -> RunPlan:
        """Returns the plan of a run with one step and one checkpoint, without times."""
        sizes = self.sizes
        saved = sizes.total if sizes.saved_parameters is None else sizes.saved_parameters
        return RunPlan(
            parameters=dict(sizes.parameters),
            blocks=dict(sizes.blocks),
            trainable_parameters=sizes.trainable_parameters,
            flops_per_token=sum(work.flops for work in self.works),
            tokens_per_step=self.tokens,
            steps=1,
            memory_bytes=memory_of(sizes, self.forward, self.devices, self.sharded),
            checkpoint_bytes=VALUE_BYTES * (saved + sizes.optimizer_values + sizes.carried_values),
            checkpoints=1,
            devices=self.devices,
        )


# The work of a learner, computed from its modules. It is counted as in papers, with every layer on every token,
# although the last layer may compute only some tokens.


_TABLES = (nn.Embedding, Position)
"""Modules whose values are looked up, not multiplied."""


def works_of(
    learner: BaseLearner, fractions: Mapping[str, float], predicted: float, length: float, decoder_fraction: float = 0.5
) -> Iterator[Work]:
    """Yields the work of every part of a learner.

    Args:
        fractions: The fraction of the tokens that a part processes, by the name of the part. A part without an entry
            runs once per example, except heads over the vocabulary.
        predicted: The fraction of the tokens that a head over the vocabulary processes if `fractions` has no entry.
        length: The mean number of tokens per example, of both sides of an encoder-decoder together.
        decoder_fraction: The decoder's fraction of an encoder-decoder's tokens.
    """
    yield from _backbone_works(learner.backbone, length, decoder_fraction, 1.0, _passes(learner.backbone))
    if learner.config.query_stream:
        yield _query_stream_work(cast(OneStack, learner.backbone), predicted, length)
    parts = {f"heads.{name}": head for name, head in learner.heads.items()}
    if learner.objective is not None:
        parts |= {f"objective.{name}": module for name, module in learner.objective.items()}
    for name, part in parts.items():
        if isinstance(part, Backbone):
            yield from _backbone_works(part, length, decoder_fraction, fractions.get(name, 1.0), 3)
        else:
            if isinstance(part, EnhancedMaskedLMHead):
                yield _enhanced_decoder_work(cast(OneStack, decoding_backbone(learner)), length)
            fraction = fractions.get(name, predicted if isinstance(part, LMHead) else 1 / length)
            yield Work(fraction, _matrix_values([part]) + _output_table_values(part, learner.backbone))


def _enhanced_decoder_work(backbone: OneStack, length: float) -> Work:
    """An enhanced mask decoder (DeBERTa) applies the last layer a second time."""
    layers = list(backbone.applied_layers())
    last = layers[-1:]
    return Work(1.0, _matrix_values(last), _attention_width(last), backbone.attended_tokens(len(layers) - 1, length))


def _query_stream_work(backbone: OneStack, fraction: float, length: float) -> Work:
    """A query stream (XLNet) passes through all layers at the predicted tokens, which have queries but no keys."""
    layers = list(backbone.applied_layers())
    projections = _matrix_values(part for layer in layers for part in _key_value_maps(cast(nn.Module, layer.self_attn)))
    return Work(
        fraction, _matrix_values(layers) - projections, _attention_width(layers), backbone.attended_tokens(0, length)
    )


def _passes(backbone: Backbone) -> float:
    """The cost of a training step in forward passes: 1, plus 1 for the gradients of the hidden states if anything is
    trained, plus the fraction of the matrices' elements that is trained, for the gradients of the matrices."""
    parts = [part for part in backbone.modules() if not isinstance(part, _TABLES)]
    matrices = [parameter for part in parts for parameter in part.parameters(recurse=False) if parameter.ndim > 1]
    trainable_values = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)
    trains = any(parameter.requires_grad for parameter in backbone.parameters())
    return 1 + trains + trainable_values / max(1, sum(parameter.numel() for parameter in matrices))


def _backbone_works(
    backbone: Backbone, length: float, decoder_fraction: float, fraction: float, passes: float
) -> Iterator[Work]:
    """Yields the work of the layers on the fraction `fraction` of all tokens, including virtual tokens. A shared layer
    counts as often as it is applied. The keys and values of a prefix are attended to, but not computed."""
    if isinstance(backbone, EncoderDecoder):
        embedding = _matrix_values([backbone.embed])
        encoder, decoder = backbone.encoder.layers, backbone.decoder.layers
        cross_attentions = [cast(MultiHead, layer.cross_attn) for layer in decoder]
        # The keys and values of cross-attention are computed from the encoder's tokens, so they count there.
        cross_keys = _matrix_values(part for cross in cross_attentions for part in _key_value_maps(cross))
        encoder_length = (1 - decoder_fraction) * length + backbone.embed.virtual_count
        decoder_length = decoder_fraction * length
        # A decoder's token attends to half of its text on average.
        encoder_context = encoder_length + backbone.encoder.ahead
        decoder_context = decoder_length / 2 + backbone.decoder.ahead
        cross_context = encoder_length + backbone.decoder.cross_ahead
        encoder_values = embedding + _matrix_values(encoder) + cross_keys
        decoder_values = embedding + _matrix_values(decoder) - cross_keys
        cross_width = sum(_head_width(cross) for cross in cross_attentions)
        encoder_fraction = fraction * encoder_length / length
        yield Work(encoder_fraction, encoder_values, _attention_width(encoder), encoder_context, passes)
        yield Work(fraction * decoder_fraction, decoder_values, _attention_width(decoder), decoder_context, passes)
        yield Work(fraction * decoder_fraction, 0, cross_width, cross_context, passes)
        return
    total_length = length + backbone.embed.virtual_count
    if not isinstance(backbone, OneStack):
        # A family that is not a stack of layers counts as a whole, each of its modules once.
        yield Work(fraction * total_length / length, _matrix_values([backbone]), passes=passes)
        return
    layers = list(backbone.applied_layers())
    widths = [_attention_width([layer]) for layer in layers]
    weighted = [width * backbone.attended_tokens(number, total_length) for number, width in enumerate(widths)]
    mean_context = sum(weighted) / max(1, sum(widths)) + backbone.ahead
    values = _matrix_values([backbone.embed, *layers])
    yield Work(fraction * total_length / length, values, sum(widths), mean_context, passes)


def _matrix_values(modules: Iterable[nn.Module]) -> int:
    """Counts the elements of the matrices that the vector of each token is multiplied with: not tables, which are
    looked up, nor matrices that are used once per batch, for virtual tokens or for the keys and queries of
    positions."""
    parts = [part for module in modules for part in module.modules()]
    excluded = {inner for part in parts if isinstance(part, VirtualTokens) for inner in part.modules()}
    # Character convolutions apply their matrices several times per word, and count their products themselves.
    character_readers = [part for part in parts if isinstance(part, WordCharacters)]
    excluded |= {inner for reader in character_readers for inner in reader.modules()}
    excluded |= {getattr(part, name) for part in parts if isinstance(part, MultiHead) for name in part.table_maps}
    return sum(reader.products for reader in character_readers) + sum(
        values.numel()
        for part in parts
        if part not in excluded and not isinstance(part, _TABLES)
        for values in part.parameters(recurse=False)
        if values.ndim > 1
    )


def _key_value_maps(attention: nn.Module) -> Iterator[nn.Module]:
    return (part for name, part in attention.named_children() if name in ("k_proj", "v_proj"))


def _attention_width(layers: Iterable[nn.Module]) -> int:
    """The total width of the attention heads, summed over layers."""
    return sum(_head_width(layer.self_attn) for layer in layers if hasattr(layer, "self_attn"))


def _head_width(attention: Any) -> int:
    if isinstance(attention, MultiHead):
        return attention.num_heads * attention.head_size
    return int(attention.q_proj.weight.shape[0])  # additive attention


def _output_table_values(head: nn.Module, backbone: Backbone) -> int:
    """Counts the elements of the table with which a head predicts tokens, unless `_matrix_values` of the head includes
    them. Skip-gram and GloVe multiply with one row per predicted word. A head with sampled softmax multiplies only with
    the sampled words, so the others, which `_matrix_values` counts, are subtracted, and the result may be negative."""
    if isinstance(head, WordPairsHead | CooccurrenceHead):
        return head.output.token.embedding_dim
    if isinstance(head, SampledLMHead):
        return (head.logits_per_target - len(head.output_table)) * head.output_table.shape[1]
    if not isinstance(head, LMHead) or (isinstance(head, BackboneLMHead) and head.output is not None):
        return 0
    table = backbone.embed.token.weight
    return round(head.rows_read * table.shape[1]) if isinstance(head, AdaptiveLMHead) else table.numel()


def _all_works(
    config: RunConfig,
    learner: BaseLearner,
    teachers: Sequence[BaseLearner],
    works: Callable[[BaseLearner], Iterator[Work]],
) -> Iterator[Work]:
    """Yields the work of all models in a step: the learner, teachers without gradients, and trained peers."""
    yield from works(learner)
    for teacher in teachers if config.distill.same_batches else ():
        yield from (replace(work, passes=1) for work in works(teacher))
    if isinstance(config.distill, CodistillationConfig):
        peer = planned_learner(configuration_of_peers(cast(TrainingConfig, config), config.distill))
        yield from list(works(peer)) * (config.distill.learners - 1)


def plan_of(
    config: RunConfig, learner: BaseLearner, metadata: JsonMapping, target: Precision | PlannedDevice
) -> RunPlan:
    """Plans a run without phases. metadata: that of the training loader. target: the device to plan for; or the device
    and number format of this machine, whose speed is then measured for at most a third of a second."""
    single = _plan_one_step(config, learner, metadata, _planned_device(config, target))
    limits = _step_limits(config, single, metadata)
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    return replace(_extend_plan(config, single, steps), ends_by=budget, epochs=steps / metadata["steps_per_epoch"])


def plan_in_phases(
    config: PretrainConfig,
    learner: BaseLearner,
    metadata: Sequence[JsonMapping],
    target: Precision | PlannedDevice,
) -> tuple[RunPlan, PhaseFractions]:
    """Plans a run with phases. Returns the plan, and the numbers from which the length of each phase is computed.
    metadata: that of each phase's loader. target: see `plan_of`."""
    device = _planned_device(config, target)
    singles = [
        _plan_one_step(phase, learner, loader, device)
        for phase, loader in zip(config.phase_configs, metadata, strict=True)
    ]
    fractions = PhaseFractions(
        tuple(phase["share"] for phase in config.phases),
        tuple(single.tokens_per_step for single in singles),
        tuple(single.flops_per_step for single in singles),
        tuple(phase.scaled_optimizer.lr / config.scaled_optimizer.lr for phase in config.phase_configs),
    )

    def plan_mean_step(budget: str) -> RunPlan:
        """The budget that ends a run weights its phases."""
        tokens, flops = (fractions.mean(values, budget) for values in (fractions.tokens, fractions.flops))
        largest = max(singles, key=lambda single: single.needed_bytes)
        seconds = largest.step_seconds
        if seconds is not None:
            ratio = flops / largest.flops_per_step
            seconds = seconds[0] * ratio, seconds[1] * ratio
        return replace(largest, tokens_per_step=tokens, flops_per_token=flops / tokens, step_seconds=seconds)

    limits = {
        budget: _step_limits(config, plan_mean_step(budget), metadata[0])[budget]
        for budget in _step_limits(config, singles[0], metadata[0])
    }
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    last_steps = fractions.last_steps(steps, budget)
    phases = tuple(
        PhasePlan(words_of_phase(phase), phase["share"], before + 1, last, single.tokens_per_step)
        for phase, before, last, single in zip(config.phases, [0, *last_steps], last_steps, singles, strict=False)
    )
    run_plan = _extend_plan(config, plan_mean_step(budget), steps)
    note = f"throughout the run, held-out text is processed with the settings of the last phase, phase {len(phases)}"
    return replace(run_plan, ends_by=budget, phases=phases, notes=(*run_plan.notes, note)), fractions


def _planned_device(config: RunConfig, target: Precision | PlannedDevice) -> PlannedDevice:
    if isinstance(target, PlannedDevice):
        return target
    return this_machine(config.model.hidden_size, config.model.inner_size, target)


def _plan_one_step(config: RunConfig, learner: BaseLearner, metadata: JsonMapping, device: PlannedDevice) -> RunPlan:
    predicted = metadata.get("predicted_fraction", 0.0)
    fractions = _token_fractions(config) if isinstance(config, PretrainConfig) else {}
    # In a task without predicted tokens, encoder and decoder read the same text: half of the tokens are the decoder's.
    decoder_fraction, length, teachers = predicted or 0.5, metadata["mean_length"], planned_teachers(config)
    works = list(
        _all_works(
            config, learner, teachers, lambda model: works_of(model, fractions, predicted, length, decoder_fraction)
        )
    )
    tokens, devices = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"], devices_of(config)
    sizes, forward = _sizes(config, learner, teachers, device), _forward(config, learner, metadata, device)
    sharded = config.parallel == "fsdp" and devices > 1
    # Several processes on one CPU share its cores, so a step takes as long as on one device.
    computing_devices = devices if device.cuda else 1
    layers = sum(len(layers_of(backbone)) for backbone in backbones_of(learner))
    forwards = max(1.0, tokens / devices / max(forward.tokens, 1))
    work = StepWork(
        sum(work.flops for work in works) * tokens / computing_devices,
        forward.activation_bytes / max(forward.tokens, 1) * tokens / computing_devices,
        sizes.trainable_parameters,
        layers * forwards,
        computing_devices,
        sharded,
        forwards,
    )
    single = StepCosts(works, tokens, sizes, forward, devices, sharded).plan()
    return replace(
        single,
        step_seconds=device.estimate_seconds(work),
        time_source=device.time_source,
        capacity_bytes=device.capacity_bytes,
    )


def devices_of(config: RunConfig) -> int:
    """Returns the number of training processes: the configured number, or that of the processes that torchrun
    started."""
    return config.devices or int(os.environ.get("WORLD_SIZE", "1"))


def _sizes(config: RunConfig, learner: BaseLearner, teachers: Sequence[BaseLearner], device: PlannedDevice) -> Sizes:
    trainable, optimizer_values = trained_values(learner, config.optimizer)
    layers = [values_of(layer) for backbone in backbones_of(learner) for layer in set(layers_of(backbone))]
    return Sizes(
        parameters=parameters_by_part(learner),
        trainable_parameters=trainable,
        optimizer_values=optimizer_values,
        layer_parameters=sum(layers),
        largest_layer=max(layers, default=0),
        teacher_parameters=sum(map(values_of, teachers)),
        copied_bytes=copied_bytes(learner, _formats(config, device)),
        saved_parameters=saved_values(config, learner),
        carried_values=_carried_values(config, learner),
        blocks=parameters_by_block(learner.backbone),
    )


def _carried_values(config: RunConfig, learner: BaseLearner) -> int:
    """The values of the state that a run carries from batch to batch, over all streams of text."""
    backbone = learner.backbone
    if not isinstance(config, PretrainConfig) or not isinstance(backbone, StatefulBackbone):
        return 0
    if not reads_lanes(config.model, config.objective, config.data):
        return 0
    streams = config.batch_examples or max(1, (config.batch_tokens or 0) // config.max_length)
    return streams * sum(tensor.numel() for tensor in backbone.initial_state(1).values())


def _formats(config: RunConfig, device: PlannedDevice) -> Formats:
    return Formats(device.precision.name != "fp32", device.cuda, config.gradient_checkpointing)


def _token_fractions(config: PretrainConfig) -> dict[str, float]:
    fractions = config.objective.token_fractions
    if isinstance(config.distill, StandardConfig) and config.distill.every_token:
        return fractions | {name: 1.0 for name in fractions if name.endswith("masked_lm")}
    return fractions


def _forward(config: RunConfig, learner: BaseLearner, metadata: JsonMapping, device: PlannedDevice) -> Forward:
    formats, length = _formats(config, device), metadata["mean_length"]
    predicted = metadata.get("predicted_fraction", 0.0)
    tokens = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"] / devices_of(config)
    if config.micro_batch_tokens is not None:
        # The limit of a forward pass includes virtual tokens, but the number of tokens per step does not.
        tokens = min(tokens, config.micro_batch_tokens / lengthening(learner, length))
    if isinstance(config, PretrainConfig):
        memory = config.model.max_memory_length * reads_lanes(config.model, config.objective, config.data)
        head_fractions = [value for name, value in _token_fractions(config).items() if name.startswith("heads.")]
        read_fraction = min(1.0, max(head_fractions, default=1.0))
    else:
        read_fraction, memory = 1.0 if cast(FinetuneConfig, config).task.scores_tokens else 1 / length, 0
    activations = saved_activations(learner, formats, length, predicted or 0.5, read_fraction, memory)
    return Forward(tokens, activations, head_bytes(learner, formats, predicted * tokens), device.cuda)


def _step_limits(config: RunConfig, single: RunPlan, metadata: JsonMapping) -> dict[str, float]:
    """The number of steps after which each budget of a run is exhausted. single: the plan of one step."""
    steps_per_epoch = metadata["steps_per_epoch"]
    limits = {"max_steps": float(config.max_steps or "inf")}
    if config.max_epochs is not None:
        limits["max_epochs"] = config.max_epochs * steps_per_epoch
    if config.max_words is not None and "words_per_epoch" in metadata:
        limits["max_words"] = config.max_words / metadata["words_per_epoch"] * steps_per_epoch
    if config.max_tokens is not None:
        limits["max_tokens"] = config.max_tokens / single.tokens_per_step
    if config.max_flops is not None:
        limits["max_flops"] = config.max_flops / single.flops_per_step
    if config.max_minutes is not None and single.seconds:
        limits["max_minutes"] = 60 * config.max_minutes / single.seconds
    return limits


def _whole_steps(limit: float) -> int:
    """The tolerance keeps rounding errors from adding a step."""
    return max(1, math.ceil(min(limit, MOST_STEPS) - 1e-9))


def _extend_plan(config: RunConfig, single: RunPlan, steps: int) -> RunPlan:
    evaluations = math.ceil(steps / (config.evaluate_every or math.ceil(steps / 10)))
    rows = math.ceil(steps * rows_an_interval(config.log_every, steps) / config.log_every)
    logs = FOLDER_BYTES + ROW_BYTES * (rows + evaluations)
    retained = retained_checkpoints(config, steps)
    set_budgets = budgets(config.model_dump(include=set(BUDGETS)))
    batch = config.batch_examples, config.batch_tokens
    return replace(
        single, steps=steps, checkpoints=retained, log_bytes=logs, evaluations=evaluations, budgets=set_budgets,
        warnings=tuple(config.schedule.remarks(steps)), notes=(*single.notes, *config.optimizer.remarks(*batch)),
    )  # fmt: skip


# Overrides with which a run fits into memory. Each override is verified by a plan of the run that has it.

_RECOMPUTE = {"gradient_checkpointing": True}


def what_fits(config: RunConfig, plan_run: Callable[[RunConfig], RunPlan]) -> tuple[str, ...]:
    """Finds overrides with which a run fits into memory: the smallest change of each kind that fits. Kinds that cost
    more than time are only tried if no other kind fits. Returns lines for the screen, each with the overrides, the
    memory that the run then needs, and what the overrides cost; none if nothing fits."""
    lines = []
    for kinds in (_overrides_costing_time(config), _overrides_changing_run(config)):
        for kind in kinds:
            for text, values, costs in kind:
                candidate = config.model_copy(update=dict(values))
                if _is_legal(candidate) and (plan := plan_run(candidate)).fits:
                    lines.append(f"{text}: {size(plan.needed_bytes)}{costs}")
                    break
        if lines:
            break
    return tuple(lines)


def _is_legal(config: RunConfig) -> bool:
    values = {key: getattr(config, key) for key in type(config).model_fields}
    return not list(violations(type(config), values, running=False))


Override = tuple[str, JsonMapping, str]
"""Overrides as text, their values by key, and what they cost, as text."""


def _overrides_costing_time(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Kinds of overrides that leave the result unchanged, each from the smallest change: smaller forward passes, and
    recomputed layers without or with smaller forward passes."""
    smaller = list(_micro_batches(config))
    yield [(text, values, ", the same result") for text, values in smaller]
    if not config.gradient_checkpointing:
        costs = ", the same result, a third more work"
        yield [
            (f"gradient_checkpointing=true {text}".strip(), {**values, **_RECOMPUTE}, costs)
            for text, values in [("", {}), *smaller]
        ]


def _overrides_changing_run(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Kinds of overrides that need more devices, or another optimizer with less state, each combined with the smallest
    forward passes and recomputed layers."""
    text, smallest = [("", {}), *_micro_batches(config)][-1]
    text, values = f"gradient_checkpointing=true {text}".strip(), {**smallest, **_RECOMPUTE}
    yield [
        (f"devices={number} parallel=fsdp {text}", {**values, "devices": number, "parallel": "fsdp"}, " per device")
        for number in (2, 4, 8, 16, 32, 64, 128, 256)
        if number > devices_of(config)
    ]
    values |= {"optimizer": AdafactorConfig(lr=config.scaled_optimizer.lr)}
    yield [(f"optimizer=adafactor {text}", values, ", another optimizer with its own learning rates")]


def _micro_batches(config: RunConfig) -> Iterator[tuple[str, JsonObject]]:
    """Overrides for forward passes of half the tokens, a quarter, and so on, down to one sequence."""
    tokens = config.micro_batch_tokens or config.batch_tokens or (config.batch_examples or 1) * config.max_length
    while (tokens := tokens // 2) >= config.max_length:
        yield f"micro_batch_tokens={tokens}", {"micro_batch_tokens": tokens}
