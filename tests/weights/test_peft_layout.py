"""LoRA in PEFT's layout on every family, both ways, against the library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmtool.config.tables import build, lookup
from lmtool.errors import UserError
from lmtool.tuning.places import layers
from lmtool.weights.load import load
from lmtool.weights.peft import adapter, lora, prompts
from lmtool.weights.peft.maps import PublishedMap, published_maps
from lmtool.weights.peft.tuned import Tuned
from tests.weights.published_folders import FAMILIES, logits_of, make, sample

peft = pytest.importorskip("peft")


def maps_of(parts: nn.Module, config: Any) -> list[PublishedMap]:
    names = [
        f"{place.name}.{name}"
        for place in layers(parts.backbone)
        for name, module in place.layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    tensors = {name: tensor for name, tensor in parts.state_dict().items() if name not in parts.added}
    return published_maps(config, tensors, names)


def tuned(folder: Path, **fields: Any) -> tuple[Any, Tuned]:
    """A published folder as lmtool reads it, with LoRA that does something; and that for PEFT."""
    loaded = load(str(folder))
    config, parts = lookup("tuning", "lora").config.model_validate_json(json.dumps(fields)), loaded.model.parts
    parts.weights = {}
    parts.tune(build(config))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0, 0.3)
    added = {name: tensor for name, tensor in parts.state_dict().items() if name in parts.added}
    section = json.loads(config.model_dump_json())
    return loaded, Tuned(loaded.config, section, added, maps_of(parts, loaded.config), None, ())


def close(given: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> bool:
    """Whether they differ by so much of the largest at most."""
    return bool((given - expected).abs().max() <= share * expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_there_and_back(family: str, tmp_path: Path) -> None:
    published = make(family, tmp_path / "published")
    ids, mask, decoder = sample(family in ("t5", "bart", "transformer"))
    # XLNet's attention has its maps as plain parameters there.
    attention = () if family == "xlnet" else ("q_proj", "v_proj", "out_proj")
    loaded, ours = tuned(
        tmp_path / "published", rank=3, projections=(*attention, "fc_in", "fc_out"),
        rank_stabilised=family in ("gpt", "bert"),
    )  # fmt: skip
    before = logits_of(published, ids, mask, decoder)
    adapter.write_adapter(ours, {}, str(tmp_path / "published"), None, loaded.tokenizer, "", tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(published, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = loaded.model(ids, mask, decoder).logits
    real = mask.bool() if decoder is None else torch.ones_like(decoder, dtype=torch.bool)
    given = logits_of(theirs, ids, mask, decoder)
    assert close(given[real], expected[real]) and not close(before[real], expected[real], 1e-2)
    settings, tensors = adapter.read_adapter(tmp_path / "adapter")
    section, added = lora.from_peft(settings, tensors, ours.maps)
    # Queries, keys and values that are one map there come back with more ranks.
    assert section["rank"] == (3 * len(ours.maps[0].parts) - 3 if len(ours.maps[0].parts) == 3 else 3)
    again, _ = tuned(tmp_path / "published", **section)
    assert again.model.parts.added == added.keys()
    again.model.parts.load_state_dict(added, strict=False)
    with torch.no_grad():
        assert close(again.model(ids, mask, decoder).logits[real], expected[real])


def test_maps_that_are_no_modules_there_are_refused(tmp_path: Path) -> None:
    make("xlnet", tmp_path / "published")
    loaded, ours = tuned(tmp_path / "published", rank=2, projections=("q_proj", "fc_in"))
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj of this model is no linear module"):
        adapter.write_adapter(ours, {}, str(tmp_path / "published"), None, loaded.tokenizer, "", tmp_path / "adapter")


def test_what_peft_makes_of_patterns_and_of_a_few_layers(tmp_path: Path) -> None:
    """Ranks and scales by module, layers without an update, and a joined map: filled with zeros."""
    published = make("gpt", tmp_path / "published")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["c_attn", "h.1.mlp.c_proj"], rank_pattern={"h.0.attn.c_attn": 5},
        alpha_pattern={"c_proj": 9}, init_lora_weights=False, fan_in_fan_out=True,
    )  # fmt: skip
    ids, mask, _ = sample(False)
    theirs = peft.get_peft_model(published, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits_of(theirs, ids, mask, None)
    loaded, ours = tuned(tmp_path / "published", rank=1)
    settings, tensors = adapter.read_adapter(tmp_path / "adapter")
    adapter.require_maps(adapter.updates_of(tensors), ours.maps)
    section, added = lora.from_peft(settings, tensors, ours.maps)
    assert section["rank"] == 5 and section["projections"] == ["fc_out", "k_proj", "q_proj", "v_proj"]
    again, _ = tuned(tmp_path / "published", **section)
    again.model.parts.load_state_dict(added, strict=False)
    with torch.no_grad():
        given = again.model(ids, mask).logits
    assert close(given[mask.bool()], expected[mask.bool()])
    for change, message in (
        ({"use_dora": True}, "lmtool has no DoRA"),
        ({"bias": "all"}, "lmtool reads bias=none"),
    ):
        with pytest.raises(UserError, match=message):
            lora.from_peft({**settings, **change}, tensors, ours.maps)
    with pytest.raises(UserError, match="has no update of a map"):
        lora.from_peft(settings, {}, ours.maps)
    wrong = {name: tensor[:, :-1] if "lora_A" in name else tensor for name, tensor in tensors.items()}
    with pytest.raises(UserError, match="the map has 108 outputs and 36 inputs"):
        lora.from_peft(settings, wrong, ours.maps)


@pytest.mark.parametrize(
    ("name", "task_type", "heads"),
    [
        ("virtual", "CAUSAL_LM", ["score.weight"]), ("virtual", "SEQ_CLS", []), ("virtual", None, []),
        ("prefix", "SEQ_2_SEQ_LM", []), ("decoder.prefix", "CAUSAL_LM", []),
    ],
)  # fmt: skip
def test_prompts_that_peft_reads_elsewhere_are_refused(name: str, task_type: str | None, heads: list[str]) -> None:
    added = {f"backbone.{'embed.' if name == 'virtual' else ''}{name}.weight": torch.zeros(2, 64)}
    model = lookup("model", "gpt").config(num_layers=1, hidden_size=32, num_heads=2)
    with pytest.raises(UserError, match="with another head or task"):
        prompts.to_peft(Tuned(model, {"name": "prompt"}, added, (), task_type, heads))


def test_a_method_without_a_layout_names_another_export() -> None:
    with pytest.raises(UserError, match="tuning=adapter has no layout in PEFT") as refused:
        adapter.writer_of("adapter")
    assert "format=delta" in str(refused.value.hint)
