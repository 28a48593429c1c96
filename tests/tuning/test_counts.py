"""Trainable parameters of each tuning method by role match published numbers and formulas, on the meta device.

To add a method: a line in `COUNTS`.
"""

from __future__ import annotations

import pytest
import torch

from lmtool.costs.memory_of_run import trainable_by_role
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from tests.tuning.tuning_fixtures import tuned

BERT, GPT, ALBERT, BART, T5 = BertConfig(), GptConfig(), AlbertConfig(), BartConfig(), T5Config()
# BERT base without its pooler, which counts as a head; the pooler; a classifier of two classes.
BACKBONE, POOLER, CLASSIFIER = 108_891_648, 768 * 768 + 768, 2 * 768 + 2
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")

COUNTS = [
    # (model, tuning, trainable parameters of the backbone, of the method, of the heads)
    (BERT, {"name": "full"}, BACKBONE, 0, POOLER + CLASSIFIER),
    (BERT, {"name": "head"}, 0, 0, CLASSIFIER),
    # Peters et al. 2018: a weight per layer, one for the embedding, and gamma; a pooler after a mix is trained.
    (BERT, {"name": "head", "layers": "scalar_mix"}, 0, 12 + 1 + 1, POOLER + CLASSIFIER),
    (BERT, {"name": "head", "layers": "concat_last_4"}, 0, 0, 4 * 768 * 768 + 768 + CLASSIFIER),
    (GPT, {"name": "head", "layers": "concat_last_4"}, 0, 0, 4 * CLASSIFIER - 3 * 2),
    # Two of BERT's layers; the top two decoder layers of BART.
    (BERT, {"name": "last_n", "layers": 2}, 2 * 7_087_872, 0, CLASSIFIER),
    (BART, {"name": "last_n", "layers": 2}, 2 * 9_451_776, 0, CLASSIFIER),
    (GPT, {"name": "last_n"}, 3 * 7_087_872 + 2 * 768, 0, CLASSIFIER),
    # Hu et al. 2021: 0.3 M for r=8 on q and v; on all linear maps; on T5 base, whose decoder layers attend twice.
    (BERT, {"name": "lora"}, 0, 294_912, CLASSIFIER),
    (GPT, {"name": "lora"}, 0, 294_912, CLASSIFIER),
    (BERT, {"name": "lora", "rank": 16, "projections": ("q_proj",)}, 0, 294_912, CLASSIFIER),
    (BERT, {"name": "lora", "projections": LINEARS}, 0, 12 * 8 * (4 * 2 * 768 + 2 * (768 + 3072)), CLASSIFIER),
    (T5, {"name": "lora"}, 0, 884_736, CLASSIFIER),
    # Liu et al. 2024: DoRA adds a magnitude per output; bias=all as in bitfit, or only of the adapted maps.
    (BERT, {"name": "lora", "dora": True}, 0, 294_912 + 24 * 768, CLASSIFIER),
    (BERT, {"name": "lora", "bias": "all"}, 102_912 - 768, 294_912, 768 + CLASSIFIER),
    (BERT, {"name": "lora", "bias": "lora_only"}, 24 * 768, 294_912, CLASSIFIER),
    # ALBERT shares one layer: one pair of matrices per linear map.
    (ALBERT, {"name": "lora"}, 0, 2 * 8 * (768 + 768), CLASSIFIER),
    # Liu et al. 2022: one vector each for keys, values and the feed-forward part.
    (BERT, {"name": "ia3"}, 0, 12 * (768 + 768 + 3072), CLASSIFIER),
    (T5, {"name": "ia3"}, 0, 12 * (2 * 768 + 3072) + 12 * (4 * 768 + 3072), CLASSIFIER),
    # Ben Zaken et al. 2022: 102,912 with the pooler's 768.
    (BERT, {"name": "bitfit"}, 102_912 - 768, 0, 768 + CLASSIFIER),
    # Lester et al. 2021: a prompt of P tokens has P x d values, in ALBERT with the width of its embedding.
    (BERT, {"name": "prompt"}, 0, 100 * 768, CLASSIFIER),
    (T5, {"name": "prompt", "length": 20}, 0, 20 * 768, CLASSIFIER),
    (ALBERT, {"name": "prompt"}, 0, 100 * 128, CLASSIFIER),
    # Li and Liang 2021: a key and a value per layer; in T5 base also for self-attention and cross-attention of the
    # decoder. With reparametrization: the vectors, a layer and a map.
    (GPT, {"name": "prefix", "reparametrize": False}, 0, 2 * 12 * 10 * 768, CLASSIFIER),
    (T5, {"name": "prefix", "reparametrize": False}, 0, 3 * 2 * 12 * 10 * 768, CLASSIFIER),
    (GPT, {"name": "prefix"}, 0, 10 * 768 + 768 * 512 + 512 + (512 + 1) * 2 * 12 * 768, CLASSIFIER),
    # Liu et al. 2022: prompts at every depth, also in ALBERT.
    (BERT, {"name": "ptuning", "deep": True}, 0, 2 * 12 * 20 * 768, CLASSIFIER),
    (ALBERT, {"name": "ptuning", "deep": True}, 0, 2 * 12 * 20 * 768, CLASSIFIER),
    # Liu et al. 2021: two bidirectional LSTM layers with four gates of 384 states each, and two linear maps.
    (BERT, {"name": "ptuning"}, 0, 20 * 768 + 2 * 2 * 4 * 384 * (768 + 384 + 2) + 2 * (768 * 768 + 768), CLASSIFIER),
    (BERT, {"name": "ptuning", "encoder": "mlp"}, 0, 20 * 768 + 3 * (768 * 768 + 768), CLASSIFIER),
    # Houlsby et al. 2019: two per layer of width 64, and norms. Pfeiffer et al. 2021: one of width 48. He et al. 2022.
    (BERT, {"name": "adapter", "placement": "houlsby"}, 12 * 2 * 2 * 768, 2_379_264, CLASSIFIER),
    (BERT, {"name": "adapter", "placement": "pfeiffer"}, 0, 894_528, CLASSIFIER),
    (BERT, {"name": "adapter", "placement": "parallel"}, 0, 12 * (2 * 768 * 384 + 768 + 384), CLASSIFIER),
    (ALBERT, {"name": "adapter", "placement": "pfeiffer"}, 0, 894_528 // 12, CLASSIFIER),
    # A decoder layer has the same slots as an encoder layer.
    (T5, {"name": "adapter", "placement": "pfeiffer"}, 0, 2 * 894_528, CLASSIFIER),
]


@pytest.mark.parametrize(
    ("model", "tuning", "backbone", "method", "head"),
    COUNTS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "name", None),
)
def test_trainable_parameters_match_formula(model, tuning, backbone, method, head):
    with torch.device("meta"):
        learner = tuned(model, tuning)
    roles = trainable_by_role(learner)
    assert {role: counts["trainable"] for role, counts in roles.items()} == {
        "backbone": backbone, "method": method, "head": head,
    }  # fmt: skip
    assert roles["method"]["total"] == method
    if model is BERT:
        assert roles["backbone"]["total"] == BACKBONE
    assert sum(counts["total"] for counts in roles.values()) == sum(map(torch.numel, learner.parameters()))
