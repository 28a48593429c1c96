"""Prompts, prefixes and their encoders match PEFT on GPT-2; prefixes also on encoders."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.tuning.configs.methods import PrefixConfig, PTuningConfig, SoftPromptConfig
from lmtool.types import Packed
from lmtool.weights.padded_model import load
from tests.weights.published_folders import make

peft = pytest.importorskip("peft")
COUNT, WIDTH = 3, 36
IDS = torch.tensor([[5, 17, 200, 31, 8, 9, 77], [3, 3, 4, 120, 9, 250, 11]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt")
    make("gpt", path)
    return path


def theirs_of(folder, config):
    """Logits of PEFT's model after its virtual tokens, and its prompt encoder."""
    import transformers

    torch.manual_seed(3)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config).eval()
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits[:, -IDS.shape[1] :]
    return logits, model.prompt_encoder["default"]


def ours_of(folder, method, weights):
    """Logits of lmtool's model with a method and the weights of PEFT's prompt encoder."""
    parts = load(folder).model.parts
    parts.tune(build(method))
    backbone = parts.backbone
    module = backbone.prefix if backbone.embed.virtual is None else backbone.embed.virtual
    module.load_state_dict(weights)
    with torch.no_grad():
        hidden = backbone(Packed(IDS.flatten(), (IDS.shape[1],) * len(IDS)))
        return parts.heads["lm"](hidden, backbone.embed.token.weight).view(*IDS.shape, -1)


NAMES = {
    "embedding.": "", "transform.0.": "inner.", "transform.2.": "output.", "lstm_head.": "lstm.",
    "mlp_head.0.": "maps.0.", "mlp_head.2.": "maps.1.", "mlp_head.4.": "maps.2.",
}  # fmt: skip
CASES = {
    "prompt": (SoftPromptConfig(length=COUNT), "PromptTuningConfig", {}),
    "prefix": (PrefixConfig(length=COUNT, reparametrize=False), "PrefixTuningConfig", {}),
    "reparametrized prefix": (
        PrefixConfig(length=COUNT, inner_size=7), "PrefixTuningConfig",
        {"prefix_projection": True, "encoder_hidden_size": 7},
    ),
    "lstm": (
        PTuningConfig(length=COUNT), "PromptEncoderConfig",
        {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": WIDTH // 2},
    ),
    "mlp": (
        PTuningConfig(length=COUNT, encoder="mlp"), "PromptEncoderConfig",
        {"encoder_reparameterization_type": "MLP", "encoder_hidden_size": WIDTH},
    ),
    "deep": (PTuningConfig(length=COUNT, deep=True), "PrefixTuningConfig", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prompt_logits_match_peft(folder, name):
    method, kind, more = CASES[name]
    theirs, module = theirs_of(folder, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **more))
    weights = {}
    for key, tensor in module.state_dict().items():
        start = next(start for start in NAMES if key.startswith(start))
        weights[NAMES[start] + key.removeprefix(start)] = tensor
    torch.testing.assert_close(ours_of(folder, method, weights), theirs, rtol=0, atol=1e-4)
    plain = load(folder).model(IDS).logits
    assert (plain - theirs).abs().max() > 0.1


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_prefix_on_encoder_matches_peft(tmp_path, family):
    import transformers

    make(family, tmp_path)
    config = peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=COUNT)
    theirs = peft.get_peft_model(transformers.AutoModel.from_pretrained(tmp_path), config).eval()
    parts = load(tmp_path).model.parts
    parts.tune(build(PrefixConfig(length=COUNT, reparametrize=False)))
    with torch.no_grad():
        parts.backbone.prefix.weight.copy_(theirs.prompt_encoder["default"].embedding.weight)
        wanted = theirs(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
        got = parts.backbone(Packed(IDS.flatten(), (IDS.shape[1],) * len(IDS)))
    torch.testing.assert_close(got.view(wanted.shape), wanted, rtol=0, atol=1e-5)
