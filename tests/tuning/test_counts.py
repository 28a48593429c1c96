"""How many parameters each method trains, by role, against published numbers and their formulas, on the meta device.

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
    # (model, tuning, what learns of the backbone, of what was added, of the heads)
    (BERT, {"name": "full"}, BACKBONE, 0, POOLER + CLASSIFIER),
    (BERT, {"name": "head"}, 0, 0, CLASSIFIER),
    # A weight a layer and one of the embedding, and gamma (Peters et al. 2018); a pooler that reads a mix learns.
    (BERT, {"name": "head", "layers": "scalar_mix"}, 0, 12 + 1 + 1, POOLER + CLASSIFIER),
    (BERT, {"name": "head", "layers": "concat_last_4"}, 0, 0, 4 * 768 * 768 + 768 + CLASSIFIER),
    (GPT, {"name": "head", "layers": "concat_last_4"}, 0, 0, 4 * CLASSIFIER - 3 * 2),
    # Two of BERT's layers; of BART's the top two of the decoder.
    (BERT, {"name": "last_n", "layers": 2}, 2 * 7_087_872, 0, CLASSIFIER),
    (BART, {"name": "last_n", "layers": 2}, 2 * 9_451_776, 0, CLASSIFIER),
    (GPT, {"name": "last_n"}, 3 * 7_087_872 + 2 * 768, 0, CLASSIFIER),
    # Hu et al. 2021: 0.3 M for r=8 on q and v; of all maps; of T5 base, whose decoder attends twice.
    (BERT, {"name": "lora"}, 0, 294_912, CLASSIFIER),
    (GPT, {"name": "lora"}, 0, 294_912, CLASSIFIER),
    (BERT, {"name": "lora", "rank": 16, "projections": ("q_proj",)}, 0, 294_912, CLASSIFIER),
    (BERT, {"name": "lora", "projections": LINEARS}, 0, 12 * 8 * (4 * 2 * 768 + 2 * (768 + 3072)), CLASSIFIER),
    (T5, {"name": "lora"}, 0, 884_736, CLASSIFIER),
    # Liu et al. 2024: a length of each output besides; and biases, as of bitfit, or of the maps alone.
    (BERT, {"name": "lora", "dora": True}, 0, 294_912 + 24 * 768, CLASSIFIER),
    (BERT, {"name": "lora", "bias": "all"}, 102_912 - 768, 294_912, 768 + CLASSIFIER),
    (BERT, {"name": "lora", "bias": "lora_only"}, 24 * 768, 294_912, CLASSIFIER),
    # One layer is applied twelve times: one pair of matrices a map.
    (ALBERT, {"name": "lora"}, 0, 2 * 8 * (768 + 768), CLASSIFIER),
    # Liu et al. 2022: a vector for keys, one for values, one inside the feed-forward part.
    (BERT, {"name": "ia3"}, 0, 12 * (768 + 768 + 3072), CLASSIFIER),
    (T5, {"name": "ia3"}, 0, 12 * (2 * 768 + 3072) + 12 * (4 * 768 + 3072), CLASSIFIER),
    # Ben Zaken et al. 2022: 102,912 with the pooler's 768.
    (BERT, {"name": "bitfit"}, 102_912 - 768, 0, 768 + CLASSIFIER),
    # Lester et al. 2021: a prompt of P tokens has P x d values, of ALBERT those of its narrow embedding.
    (BERT, {"name": "prompt"}, 0, 100 * 768, CLASSIFIER),
    (T5, {"name": "prompt", "length": 20}, 0, 20 * 768, CLASSIFIER),
    (ALBERT, {"name": "prompt"}, 0, 100 * 128, CLASSIFIER),
    # Li and Liang 2021: a key and a value a layer; of T5 base also in the decoder, and for what it reads of the
    # encoder. In training with the vectors, the layer and the map that compute them.
    (GPT, {"name": "prefix", "reparametrize": False}, 0, 2 * 12 * 10 * 768, CLASSIFIER),
    (T5, {"name": "prefix", "reparametrize": False}, 0, 3 * 2 * 12 * 10 * 768, CLASSIFIER),
    (GPT, {"name": "prefix"}, 0, 10 * 768 + 768 * 512 + 512 + (512 + 1) * 2 * 12 * 768, CLASSIFIER),
    # Liu et al. 2022: prompts at every depth, of ALBERT too.
    (BERT, {"name": "ptuning", "deep": True}, 0, 2 * 12 * 20 * 768, CLASSIFIER),
    (ALBERT, {"name": "ptuning", "deep": True}, 0, 2 * 12 * 20 * 768, CLASSIFIER),
    # Liu et al. 2021: two layers in both directions, four gates of 384 states each, and two maps.
    (BERT, {"name": "ptuning"}, 0, 20 * 768 + 2 * 2 * 4 * 384 * (768 + 384 + 2) + 2 * (768 * 768 + 768), CLASSIFIER),
    (BERT, {"name": "ptuning", "encoder": "mlp"}, 0, 20 * 768 + 3 * (768 * 768 + 768), CLASSIFIER),
    # Houlsby et al. 2019: two a layer of width 64, and norms. Pfeiffer et al. 2021: one of width 48. He et al. 2022.
    (BERT, {"name": "adapter", "placement": "houlsby"}, 12 * 2 * 2 * 768, 2_379_264, CLASSIFIER),
    (BERT, {"name": "adapter", "placement": "pfeiffer"}, 0, 894_528, CLASSIFIER),
    (BERT, {"name": "adapter", "placement": "parallel"}, 0, 12 * (2 * 768 * 384 + 768 + 384), CLASSIFIER),
    (ALBERT, {"name": "adapter", "placement": "pfeiffer"}, 0, 894_528 // 12, CLASSIFIER),
    # A decoder's layer has the same slots as one of an encoder.
    (T5, {"name": "adapter", "placement": "pfeiffer"}, 0, 2 * 894_528, CLASSIFIER),
]


@pytest.mark.parametrize(
    ("model", "tuning", "backbone", "method", "head"),
    COUNTS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else getattr(value, "name", None),
)
def test_what_learns_is_counted(model, tuning, backbone, method, head):
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
