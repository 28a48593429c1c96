"""PEFT adapters of every family, written and read, and the meaning of adapter_config.json as in the PEFT library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtool.config.registry import build, lookup
from lmtool.errors import UserError
from lmtool.weights.padded_model import load
from lmtool.weights.peft import adapter
from lmtool.weights.peft.maps import HFBase, TunedModel, hf_linears
from lmtool.weights.peft.settings import settings_of
from lmtool.weights.reading import to_hf_names
from tests.weights.published_folders import FAMILIES, logits_of, make, sample

peft = pytest.importorskip("peft")
FILE = Path("adapter/adapter_config.json")
LORA = {"peft_type": "LORA", "target_modules": ["q_proj"]}


def load_with_lora(folder: Path, **fields: Any) -> tuple[Any, TunedModel]:
    """A published folder loaded with random LoRA matrices, and its tuned model for PEFT export."""
    loaded = load(str(folder))
    config, parts = lookup("tuning", "lora").config.model_validate_json(json.dumps(fields)), loaded.model.parts
    parts.loss_weights = {}
    parts.tune(build(config))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0, 0.3)
    added = {name: tensor for name, tensor in parts.state_dict().items() if name in parts.added_names}
    ours = {name: tensor for name, tensor in parts.state_dict().items() if name not in parts.added_names}
    base = HFBase(loaded.config, ours, to_hf_names(loaded.config, ours), hf_linears(loaded.config, ours))
    return loaded, TunedModel(json.loads(config.model_dump_json()), added, base, None)


def close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether the difference is at most this fraction of the largest expected value."""
    return bool((given - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_of_every_family_matches_peft_both_ways(family: str, tmp_path: Path) -> None:
    published = make(family, tmp_path / "published")
    ids, mask, decoder = sample(family in ("t5", "bart", "transformer"))
    # XLNet's attention maps are plain parameters in transformers.
    attention = () if family == "xlnet" else ("q_proj", "v_proj", "out_proj")
    loaded, ours = load_with_lora(
        tmp_path / "published", rank=3, projections=(*attention, "fc_in", "fc_out"),
        rank_stabilised=family in ("gpt", "bert"),
    )  # fmt: skip
    before = logits_of(published, ids, mask, decoder)
    adapter.write_adapter(ours, str(tmp_path / "published"), None, {}, tmp_path / "adapter", lambda draft: None)
    theirs = peft.PeftModel.from_pretrained(published, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = loaded.model(ids, mask, decoder).logits
    real = mask.bool() if decoder is None else torch.ones_like(decoder, dtype=torch.bool)
    given = logits_of(theirs, ids, mask, decoder)
    assert close(given[real], expected[real]) and not close(before[real], expected[real], 1e-2)
    restored = adapter.read_adapter(tmp_path / "adapter").restore(ours.base)
    # Joined query, key and value maps in transformers return with a higher rank.
    joined = len(ours.base.linears[0].parts)
    assert restored.section["rank"] == (3 * joined - 3 if joined == 3 else 3) and not restored.changed_tensors
    again, _ = load_with_lora(tmp_path / "published", **restored.section)
    assert again.model.parts.added_names == restored.added_tensors.keys()
    again.model.parts.load_state_dict(restored.added_tensors, strict=False)
    with torch.no_grad():
        assert close(again.model(ids, mask, decoder).logits[real], expected[real])


def test_maps_without_modules_in_transformers_are_refused(tmp_path: Path) -> None:
    make("xlnet", tmp_path / "published")
    _, ours = load_with_lora(tmp_path / "published", rank=2, projections=("q_proj", "fc_in"))
    with pytest.raises(UserError, match="PEFT cannot adapt the tuned layer layers.0.self_attn.q_proj"):
        adapter.write_adapter(ours, "published", None, {}, tmp_path / "adapter", lambda draft: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 3}, r"h.0.attn.c_attn is \(108, 2\) x \(2, 36\); expected 108 outputs, 36 inputs, rank 3"),
        ({"rank_pattern": {".*": 5}}, "36 inputs, rank 5"),
        (
            {"target_modules": ["c_fc"]},
            "the adapter updates transformer.h.0.attn.c_attn, which is not in target_modules",
        ),
        ({"modules_to_save": ["attn"]}, "which is not in target_modules"),
        ({"target_modules": ["c_attn", "c_fc"]}, "targets transformer.h.0.mlp.c_fc, but the adapter has no tensors"),
        ({"use_dora": True}, "the adapter has transformer.h.0.attn.c_attn without lora_magnitude_vector"),
        ({"target_modules": "("}, r"'\(' is not a regular expression: missing \)"),
    ],
)
def test_tensors_that_contradict_adapter_config_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    make("gpt", tmp_path / "published")
    _, ours = load_with_lora(tmp_path / "published", rank=2, projections=("q_proj",))
    adapter.write_adapter(ours, "published", None, {}, tmp_path / "adapter", lambda draft: None)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        adapter.read_adapter(tmp_path / "adapter").restore(ours.base)


MODULES = [
    f"{root}{stack}layers.{number}.{module}"
    for root in ("", "model.")
    for stack in ("", "encoder.", "decoder.")
    for number in (0, 1, 11)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "cross.q_proj", "mlp.experts.3.q_proj", "fc1", "xfc1")
]
NAMES = ["q_proj", "self_attn.q_proj", "fc1", "layers.1.fc1", "model.layers.0.fc1", "layers", "encoder"]
PATTERNS = [r".*q_proj", r".*\.layers\.[01]\..*", "model.*", r"fc\d", r"self_attn\.[qk]_proj", r"layers.1\..*", ""]


def test_modules_ranks_and_scales_match_peft() -> None:
    """Random configurations over many module paths."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    chance, answers = random.Random(5), set()
    for _ in range(400):
        names = chance.sample(NAMES, 2)
        fields: dict[str, Any] = {"target_modules": chance.choice([names, chance.choice(PATTERNS)])}
        fields["exclude_modules"] = chance.choice([None, None, chance.sample(NAMES, 1), chance.choice(PATTERNS)])
        fields["modules_to_save"] = chance.choice([None, None, chance.sample(NAMES, 1)])
        if isinstance(fields["target_modules"], list):
            fields["layers_to_transform"] = chance.choice([None, 0, [1, 11], []])
            if fields["layers_to_transform"] is not None:
                fields["layers_pattern"] = chance.choice([None, "layers", ["blocks", "layers"], "experts"])
        for key in ("rank_pattern", "alpha_pattern"):
            fields[key] = {name: chance.randint(1, 9) for name in chance.sample([*NAMES, *PATTERNS], 3)}
        fields |= {"r": 4, "lora_alpha": 3, "use_rslora": chance.random() < 0.5}
        ours, theirs = settings_of(FILE, {**fields, "peft_type": "LORA"}), peft.LoraConfig(**fields)
        for module in chance.sample(MODULES, 12):
            # PEFT returns a special object for an excluded module.
            found = check_target_module_exists(theirs, module)
            targeted = bool(found) and type(found).__name__ != "_ExcludedModule"
            rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, module), theirs.r)
            alpha = theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, module), theirs.lora_alpha)
            answers.add((targeted, rank, alpha))
            scale = alpha / (rank**0.5 if theirs.use_rslora else rank)
            assert (ours.targets(module), ours.rank(module), ours.scale(module)) == (targeted, rank, scale), fields
    assert len(answers) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": "x"}, 'r: given "x" (text); allowed: a whole number, at least 1'),
        ({"r": 0}, "r: given 0 (whole number); allowed: a whole number, at least 1"),
        ({"peft_type": ["LORA"]}, 'peft_type: given ["LORA"] (list); lmtool reads LORA, IA3, PROMPT_TUNING'),
        ({"peft_type": None}, "peft_type: given null"),
        ({"lora_alpha": float("nan")}, "lora_alpha: given NaN (number); allowed: a number, above 0"),
        ({"target_modules": None}, "target_modules: given null"),
        ({"rank_pattern": {"a": "b"}}, "rank_pattern: given"),
        ({"use_dora": "yes", "bias": "some"}, "(also wrong: 1 other key)"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path: given 3"),
        ({"task_type": "SEQ_CLASS"}, 'task_type: given "SEQ_CLASS" (text); allowed: SEQ_CLS'),
        ({"peft_type": "PREFIX_TUNING"}, "num_virtual_tokens is missing; allowed: a whole number, at least 1"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 changes the base's weights"),
        ({"arrow_config": {"top_k": 2}}, "lmtool has no Arrow"),
    ],
)
def test_invalid_adapter_config_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_of(FILE, {**LORA, **change})
    assert refused.value.message.startswith(f"{FILE}: ") and message in refused.value.message
    assert "\n" not in refused.value.message and refused.value.hint


def test_every_peft_key_is_known() -> None:
    """No key of the installed PEFT version is listed as unread."""
    given = {"target_modules": ["q_proj"]}
    for settings in (
        peft.LoraConfig(eva_config=peft.EvaConfig(), init_lora_weights="eva", megatron_config={"a": 1}, **given),
        peft.IA3Config(feedforward_modules=[], fan_in_fan_out=True, **given),
        peft.PromptTuningConfig(
            num_virtual_tokens=2, prompt_tuning_init="TEXT", prompt_tuning_init_text="a", tokenizer_name_or_path="b"
        ),
        peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=3, encoder_dropout=0.5),
        peft.PrefixTuningConfig(
            num_virtual_tokens=2, encoder_hidden_size=3, prefix_projection=True, init_weights="zero"
        ),
    ):
        content = json.loads(json.dumps(settings.to_dict(), default=list))
        assert settings_of(FILE, {**content, "inference_mode": True, "auto_mapping": {"a": "b"}}).unread_keys == ()


@pytest.mark.parametrize(
    ("model", "name", "task_type", "learned"),
    [
        ("gpt", "virtual", "CAUSAL_LM", ["score.weight"]), ("gpt", "virtual", "SEQ_CLS", []),
        ("gpt", "virtual", None, []), ("gpt", "prefix", "SEQ_2_SEQ_LM", []), ("gpt", "decoder.prefix", "CAUSAL_LM", []),
        ("xlnet", "virtual", "CAUSAL_LM", []),
    ],
)  # fmt: skip
def test_prompts_placed_differently_in_peft_are_refused(
    model: str, name: str, task_type: str | None, learned: list[str]
):
    added = {f"backbone.{'embed.' if name == 'virtual' else ''}{name}.weight": torch.zeros(2, 64)}
    config = lookup("model", model).config(num_layers=1, hidden_size=32, num_heads=2)
    with pytest.raises(UserError, match="PEFT would not give lmtool's outputs"):
        adapter.prompt_to_peft(TunedModel({"name": "prompt"}, added, HFBase(config, {}, {}, ()), task_type, learned))


def test_method_without_peft_layout_suggests_delta_format() -> None:
    with pytest.raises(UserError, match="tuning=adapter has no counterpart in PEFT") as refused:
        adapter.writer_of("adapter")
    assert "format=delta" in str(refused.value.hint)
