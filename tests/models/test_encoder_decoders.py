"""T5, BART and the transformer of 2017: their key maps and published configurations."""

from __future__ import annotations

import pytest
import torch

from lmtool.errors import UserError
from lmtool.models import bart, t5, transformer
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from tests.models.parity import CASES, SIZES


def test_unused_tensors_of_old_files_are_dropped():
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert t5.HF_FORMAT.from_hf({table: torch.zeros(32, 8)}) == {}
    assert bart.HF_FORMAT.from_hf({"encoder.version": torch.zeros(1), "model.decoder.version": torch.zeros(1)}) == {}


def test_t5_head_equal_to_the_embedding_table_is_tied():
    tensors = CASES["t5"].pair().theirs.state_dict()
    assert "lm_head.weight" in tensors and "heads.lm.output.weight" not in t5.HF_FORMAT.from_hf(tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    assert "heads.lm.output.weight" in t5.HF_FORMAT.from_hf(tensors)


def test_transformer_with_output_bias_is_refused():
    tensors = CASES["transformer"].pair().theirs.state_dict()
    tensors["final_logits_bias"] = torch.ones(1, SIZES["vocab_size"])
    with pytest.raises(UserError, match="final_logits_bias"):
        transformer.HF_FORMAT.from_hf(tensors)


def test_key_map_keeps_unknown_names():
    for family, config in ((t5, T5Config()), (bart, BartConfig()), (transformer, Transformer2017Config())):
        assert family.HF_FORMAT.from_hf({"encoder.strange.weight": torch.zeros(2)}).keys() <= {
            "encoder.strange.weight", "model.encoder.strange.weight",
        }  # fmt: skip
        assert "heads.sst2.output.weight" in family.HF_FORMAT.to_hf(
            {"heads.sst2.output.weight": torch.zeros(2), "backbone.embed.token.weight": torch.zeros(4, 2)}, config
        )


@pytest.mark.parametrize("name", ["t5", "bart", "transformer"])
def test_config_without_published_form_is_refused(name):
    module, config = CASES[name].module, CASES[name].config
    fields = config.model_dump()
    with pytest.raises(UserError, match="model.positions=alibi"):
        module.HF_FORMAT.to_hf_config(type(config).model_validate({**fields, "positions": {"name": "alibi"}}))
    if module is not t5:
        with pytest.raises(UserError, match="norm_epsilon"):
            module.HF_FORMAT.to_hf_config(type(config).model_validate({**fields, "norm_epsilon": 1e-6}))


def test_original_t5_config_is_read():
    """The file of t5-small omits most keys and has some that later versions lack."""
    data = {
        "architectures": ["T5WithLMHeadModel"], "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0,
        "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    }  # fmt: skip
    section = T5Config.model_validate(t5.HF_FORMAT.from_hf_config(data))
    assert (section.feedforward, section.tied, section.layers_of_decoder) == ("relu", True, 6)
    gated = {**data, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    section = T5Config.model_validate(t5.HF_FORMAT.from_hf_config(gated))
    assert (section.feedforward, section.tied) == ("gated_gelu", False)


def test_marian_config_with_default_activation_is_refused():
    published = transformer.HF_FORMAT.to_hf_config(CASES["transformer"].config)
    with pytest.raises(UserError, match="activation_function='gelu'"):
        transformer.HF_FORMAT.from_hf_config({**published, "activation_function": None})
