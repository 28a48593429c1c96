"""FLOPs and memory of a learner, computed from its parts, against torch's counts and the state of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lmtool.config.registry import build
from lmtool.costs.activations import backbones_of, copied_bytes, lengthening, saved_activations
from lmtool.costs.attention import Formats
from lmtool.costs.memory_of_run import parameters_by_block
from lmtool.costs.plan import works_of
from lmtool.data.loader import PackedLoader
from lmtool.learners.configs import MixtureConfig
from lmtool.models.base import Backbone
from lmtool.models.configs import BertConfig, GptConfig, ModelConfig
from lmtool.models.decoder_configs import TransformerXlConfig
from lmtool.models.encoder_configs import (
    AlbertConfig,
    BigbirdConfig,
    DebertaConfig,
    DebertaV3Config,
    ElectraConfig,
    ModernbertConfig,
    XlnetConfig,
)
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.models.pretransformer_configs import CnnConfig
from lmtool.models.xlnet import Xlnet
from lmtool.nn.attention import only
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.stack import Tap
from lmtool.objectives.configs import (
    ClmConfig,
    DenoisingConfig,
    MlmConfig,
    ObjectiveConfig,
    PlmConfig,
    PrefixLmConfig,
    RtdConfig,
    SpanConfig,
    SpanCorruptionConfig,
)
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.training.configs import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    OptimizerConfig,
)
from lmtool.tuning.configs.base import TuningConfig
from lmtool.tuning.configs.methods import (
    BitFitConfig,
    FullConfig,
    HeadConfig,
    LoraConfig,
    PrefixConfig,
    SoftPromptConfig,
)
from lmtool.types import Packed
from tests.objectives.objective_fixtures import SIZES, split, store, tokenizer

SMALL = {**SIZES, "hidden_size": 64, "num_heads": 4, "feedforward_size": 160, "num_layers": 3}
# Family, its fields besides the sizes, tokenizer, objective.
CASES: dict[str, tuple[type[ModelConfig], dict[str, Any], str, ObjectiveConfig]] = {
    "bert": (BertConfig, {}, "wordpiece", MlmConfig(pairs="nsp")),
    "span": (BertConfig, {}, "wordpiece", SpanConfig()),
    "albert": (AlbertConfig, {"embedding_size": 24}, "wordpiece", MlmConfig(pairs="sop")),
    "electra": (ElectraConfig, {"embedding_size": 24}, "wordpiece", RtdConfig()),
    "electra_15": (
        ElectraConfig, {}, "wordpiece", RtdConfig(variant="electra_15", generator_size=0.5, generator_layers=0.67)
    ),
    "replace_mlm": (BertConfig, {}, "wordpiece", RtdConfig(variant="replace_mlm")),
    "all_tokens_mlm": (ElectraConfig, {"embedding_size": 24}, "wordpiece", RtdConfig(variant="all_tokens_mlm")),
    "mask decoder": (DebertaConfig, {"scores": ()}, "wordpiece", MlmConfig(enhanced_decoder=True)),
    "wide mask decoder": (DebertaConfig, {"max_distance": 64}, "wordpiece", MlmConfig(enhanced_decoder=True)),
    "disentangled": (DebertaConfig, {"max_distance": 8}, "wordpiece", MlmConfig()),
    "buckets": (DebertaV3Config, {"buckets": 8, "max_distance": 16}, "wordpiece", RtdConfig()),
    "block sparse": (BigbirdConfig, {"block_size": 2, "random_blocks": 1}, "wordpiece", MlmConfig()),
    "convolution": (CnnConfig, {"embedding_size": 24}, "wordpiece", MlmConfig()),
    "query stream": (XlnetConfig, {}, "wordpiece", PlmConfig()),
    "gpt": (GptConfig, {}, "bytebpe", ClmConfig()),
    "gpt prefix": (GptConfig, {}, "bytebpe", PrefixLmConfig()),
    "t5": (T5Config, {"head_size": 8}, "t5", SpanCorruptionConfig()),
    "t5 v1.1": (
        T5Config, {"head_size": 24, "tied": False, "feedforward": "gated_gelu", "decoder_layers": 1}, "t5",
        SpanCorruptionConfig(),
    ),
    "bart": (BartConfig, {}, "roberta", DenoisingConfig()),
    "bart prefix": (BartConfig, {}, "roberta", PrefixLmConfig()),
    "mixture": (BertConfig, {}, "wordpiece", MixtureConfig(members=("mlm", "span", "rtd"), weights=(2, 1, 1))),
}  # fmt: skip


def learner_of(case: str) -> tuple[Any, Any]:
    family, fields, kind, config = CASES[case]
    tokens = tokenizer(kind)
    sizes = {name: size for name, size in SMALL.items() if name in family.model_fields}
    return build(config, build(family(**{**sizes, **fields}), 0), tokens, 3), tokens


def on_all_tokens(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backbone's forward whose layers all work on all tokens; unread tokens are dropped at the end."""
    return lambda *sides, read_M=None, **more: only(forward(*sides, **more), read_M)


@pytest.mark.parametrize("case", CASES)
def test_flops_match_torch_flop_counter(case: str) -> None:
    """Torch counts only plain attention, which computes both halves of a causal mask. The last layers work on all
    tokens, as the estimate assumes."""
    learner, tokens = learner_of(case)
    for backbone in [module for module in learner.modules() if isinstance(module, Backbone)]:
        backbone.forward = on_all_tokens(backbone.forward)
        if isinstance(backbone, Xlnet):
            backbone.run = lambda entered, read_M, run=backbone.run, **more: only(run(entered, **more), read_M)
    config = CASES[case][3]
    examples = learner.examples(split(store(tokens)), 24)
    plan = examples.plan(0)
    numbers = np.arange(len(plan))
    batch = examples.batch(plan.rows, numbers, 0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sum(learner(batch, 1).sums.values()).backward()
    predicted = examples.metadata()["predicted_fraction"]
    works = works_of(learner, config.token_fractions, predicted, batch.tokens / len(plan), config.predicted_fraction)
    assert sum(work.flops for work in works) * batch.tokens == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize(
    ("family", "objective", "length", "gigaflops"),
    [
        (BertConfig(), MlmConfig(), 128, 0.545),
        (BertConfig(), MlmConfig(), 512, 0.588),
        (BertConfig(num_layers=24, hidden_size=1024, num_heads=16, feedforward_size=4096), MlmConfig(), 512, 1.99),
        (GptConfig(), ClmConfig(), 1024, 0.798),
    ],
)
def test_flops_of_published_sizes_match_formula(
    family: ModelConfig, objective: ObjectiveConfig, length: int, gigaflops: float
) -> None:
    """6 L (4 d^2 + 2 d f) + 12 L d S (half if causal) + 6 (V d + d^2) p, in billions per token."""
    with torch.device("meta"):
        learner = build(objective, build(family, 0), None, 0)
    works = works_of(learner, objective.token_fractions, objective.predicted_fraction, length)
    assert sum(work.flops for work in works) / 1e9 == pytest.approx(gigaflops, rel=3e-3)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 30])
def test_local_layer_counts_tokens_in_its_window(length: int) -> None:
    backbone = build(ModernbertConfig(**SMALL, local_window=3), 0)
    packed = Packed(torch.zeros(length, dtype=torch.long), (length,))
    at = torch.arange(length)[None]
    for number in range(SMALL["num_layers"]):
        allowed = backbone.mask(number, packed).allow(at[..., None], at[:, None], torch.zeros(1, dtype=torch.long))
        assert backbone.is_local(number) == (allowed is not None)
        seen = float(length) if allowed is None else float(allowed.sum()) / length
        assert backbone.attended_tokens(number, length) == pytest.approx(seen)


@pytest.mark.parametrize("length", [7, 28, 32, 80])
def test_block_sparse_layer_counts_attended_tokens(length: int) -> None:
    backbone = build(BigbirdConfig(**SMALL, block_size=4, random_blocks=1), 0)
    packed = Packed(torch.zeros(length, dtype=torch.long), (length,))
    at = torch.arange(length)[None]
    for number in range(SMALL["num_layers"]):
        allowed = backbone.mask(number, packed).allow(at[..., None], at[:, None], torch.zeros(1, dtype=torch.long))
        assert (length > 28) == (allowed is not None)
        seen = float(length) if allowed is None else float(allowed[0, 0].sum()) / length
        assert backbone.attended_tokens(number, length) == pytest.approx(seen)


def test_frozen_body_costs_only_the_forward() -> None:
    with torch.device("meta"):
        learner = ClassificationConfig(name="x", labels=("a", "b")).learner(build(BertConfig(**SMALL), 0), None, 0)
    whole = next(works_of(learner, {}, 0.0, 24)).flops
    learner.tune(build(HeadConfig()))
    assert next(works_of(learner, {}, 0.0, 24)).flops * 3 == whole


def test_electra_counts_generator_and_discriminator() -> None:
    learner, _ = learner_of("electra_15")
    assert [backbone.hidden_size for backbone in backbones_of(learner)] == [64, 32]


OPTIMIZERS: tuple[OptimizerConfig, ...] = (
    AdamWConfig(), AdamWConfig(scale_parameter=True), AdamConfig(), AdafactorConfig(), AdafactorConfig(beta1=0.9),
    LambConfig(), MuonConfig(),
)  # fmt: skip


@pytest.mark.parametrize("case", ["bert", "electra", "t5"])
@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
def test_optimizer_state_has_planned_size(config: OptimizerConfig, case: str) -> None:
    learner, _ = learner_of(case)
    for parameter in learner.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build(config, learner.parameter_groups())
    optimizer.step()
    kept = sum(
        value.numel()
        for state in optimizer.state.values()
        for kind, value in state.items()
        if isinstance(value, torch.Tensor) and kind != "step"
    )
    assert kept == sum(
        config.state_size(name, tuple(parameter.shape)) for name, parameter in learner.named_parameters()
    )


@pytest.mark.parametrize("family", [BertConfig, GptConfig, T5Config])
@pytest.mark.parametrize(
    "method",
    [SoftPromptConfig(length=9), PrefixConfig(length=9, reparametrize=False)],
    ids=lambda method: method.name,
)
def test_flops_include_virtual_tokens_and_prefixes(family: Any, method: TuningConfig) -> None:
    """A forward over four texts of twelve tokens with nine virtual tokens each."""
    sizes = {**SMALL, **({"head_size": 16} if family is T5Config else {})}
    learner = ClassificationConfig(name="x", labels=("a", "b")).learner(build(family(**sizes), 0), None, 0)
    learner.tune(build(method))
    side = Packed(torch.arange(48) % 20, (12,) * 4)
    outputs, parts = ({"outputs": side}, 3) if family is T5Config else ({}, 1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        learner.backbone(side, **outputs, tap=Tap())  # with a tap, the last layer works on all tokens
    tokens = 48 * (1 + len(outputs))
    body = list(works_of(learner, {}, 0.0, tokens / 4))[:parts]
    assert sum(work.flops / work.passes for work in body) * tokens == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert lengthening(learner, tokens / 4) == (1 + 9 / (tokens / 4) if method.name == "prompt" else 1)


METHODS = {
    "full": FullConfig(), "bitfit": BitFitConfig(), "lora": LoraConfig(), "dora": LoraConfig(dora=True),
    "dora everywhere": LoraConfig(dora=True, projections=("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")),
    "lora and biases": LoraConfig(bias="all"), "head": HeadConfig(),
}  # fmt: skip


def saved_bytes(learner: Any, forward: Callable[[], Any]) -> int:
    """Bytes that autograd saves in a forward, without parameters; shared storage counts once."""
    own = {parameter.untyped_storage()._cdata for parameter in learner.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in own:
            saved[memory._cdata] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(memory.nbytes() for memory in saved.values())


@pytest.mark.parametrize(
    "case",
    [
        "bert", "albert", "electra", "disentangled", "mask decoder", "wide mask decoder", "buckets", "block sparse",
        "convolution", "gpt", "t5", "t5 v1.1", "bart",
    ],
)  # fmt: skip
def test_forward_saves_planned_activation_bytes(case: str) -> None:
    """In fp32 on a CPU with dropout; the small heads count only in the measured bytes."""
    learner, tokens = learner_of(case)
    config = CASES[case][3]
    examples = learner.examples(split(store(tokens)), 24)
    plan = examples.plan(0)
    batch = examples.batch(plan.rows, np.arange(len(plan)), 0)
    predicted = examples.metadata()["predicted_fraction"]
    of_heads = [share for name, share in config.token_fractions.items() if name.startswith("heads.")]
    kept = saved_activations(
        learner, Formats(), batch.tokens / len(plan), config.predicted_fraction, min(1.0, max(of_heads))
    )
    planned = batch.tokens * (kept.activations + kept.scores) + copied_bytes(learner, Formats())
    saved = saved_bytes(learner.train(), lambda: learner(batch, 1))
    assert planned == pytest.approx(saved, rel=0.25), predicted


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("family", "memory", "kind", "config"),
    [
        (TransformerXlConfig, 0, "bytebpe", ClmConfig()),
        (TransformerXlConfig, 48, "bytebpe", ClmConfig()),
        (XlnetConfig, 0, "wordpiece", PlmConfig()),
        (XlnetConfig, 24, "wordpiece", PlmConfig(reuse=8)),
    ],
)
def test_planned_bytes_include_memory_and_query_stream(
    family: Any, memory: int, kind: str, config: ObjectiveConfig, dropout: float
) -> None:
    """The measured step has a full memory, in lanes of 24 tokens."""
    sizes = {**SMALL, "memory_length": memory, "dropout": dropout, "attention_dropout": dropout}
    learner = build(config, build(family(**sizes), 0), tokenizer(kind), 3).train()
    loader = PackedLoader(learner.examples(split(store(tokenizer(kind))), 24), 0, batch_tokens=96)
    for _, step in zip(range(5), loader.steps(), strict=False):
        (batch,) = step.batches
        saved = saved_bytes(learner, lambda batch=batch: learner(batch, 1))
    (read,) = [share for name, share in config.token_fractions.items() if name.startswith("heads.")] or [1.0]
    kept = saved_activations(learner, Formats(), 24, 0.5, read, memory)
    planned = batch.tokens * (kept.activations + kept.scores) + copied_bytes(learner, Formats())
    assert planned == pytest.approx(saved, rel=0.25)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_planned_bytes_of_tuning_methods_match(name: str, attention_dropout: float) -> None:
    sizes = {**SMALL, "attention_dropout": attention_dropout}
    learner = ClassificationConfig(name="x", labels=("a", "b")).learner(build(BertConfig(**sizes), 0), None, 0)
    learner.tune(build(METHODS[name]))
    batch = Packed(torch.arange(96) % 20, (24,) * 4)
    numbers = torch.arange(4)
    rng = TokenRng(token_keys(0, 1, numbers, numbers, batch))
    saved = saved_bytes(learner, lambda: learner.backbone(batch, rng))
    kept = saved_activations(learner, Formats(), 24)
    planned = 96 * (kept.activations + kept.scores) + copied_bytes(learner, Formats())
    assert planned == pytest.approx(saved, rel=0.2) if name != "head" else planned == saved == 0


def test_recomputed_layers_save_only_their_input() -> None:
    learner, _ = learner_of("gpt")
    kept, again = (saved_activations(learner, Formats(recomputes=recomputes), 24) for recomputes in (False, True))
    assert again.working == pytest.approx(kept.activations / 3, rel=0.1)
    assert again.activations == pytest.approx(3 * 4 * 64, rel=0.3)


def test_parameters_are_counted_by_kind_of_block() -> None:
    width, inner, layers, rows, positions = 32, 64, 2, 100, 16
    sizes = {"vocab_size": rows, "num_layers": layers, "hidden_size": width, "num_heads": 2, "feedforward_size": inner}
    backbone = build(BertConfig(**sizes, max_positions=positions), 0)
    counts = parameters_by_block(backbone)
    norm = 2 * width
    assert counts == {
        "embeddings": (rows + positions + 2) * width + norm,
        "attention": layers * 4 * (width * width + width),
        "feed-forward": layers * (2 * width * inner + inner + width),
        "other": layers * 2 * norm,
    }
    assert sum(counts.values()) == sum(parameter.numel() for parameter in backbone.parameters())
