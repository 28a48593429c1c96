"""BigBird: Zaheer, Guruganesh, Dubey, Ainslie, Alberti, Ontanon, Pham, Ravula, Wang, Yang, Ahmed, "Big Bird:
Transformers for Longer Sequences", NeurIPS 2020; its internal construction (ITC). The sizes are those of
https://github.com/google-research/bigbird.

    token + position + segment
             |
           norm, dropout
             |
      BERT's layers (bert.py), x num_layers, with the tanh approximation of gelu
             |
          hidden

The blocks (columns) that each block (row) attends to, in a text of 14 blocks with one random block per row:

    first    # # # # # # # # # # # # # #    global: the first and last block attend to all blocks
             # # # . . * . . . . . . . #    * random
             # # # # . . . . . . . . . #
             # . # # # * . . . . . . . #
             # * . # # # . . . . . . . #    window: the block and its neighbors
               ...
    last     # # # # # # # # # # # # # #    global: all blocks attend to the first and last block

Each head of each layer has its own random blocks. Texts of at most 2 random_blocks + 5 blocks (704 tokens as published)
use full attention. The random blocks are any blocks of the text that the row does not see anyway. transformers, and
with it published weights (`random_plan=transformers`), chooses among the first 2 random_blocks + 5 blocks of a text of
any length: in training, except at 1,024, 3,072 and 4,096 tokens, those chosen here. In evaluation, transformers
replaces each random block by the first block, so results for longer texts differ.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lmtool.models.base import positions_of
from lmtool.models.bert import MASKED_LM_PAIRS, TIED, BertLike, post_norm_layer
from lmtool.models.encoder_configs import BigbirdConfig
from lmtool.models.family import ENCODER_FIELDS, HFClass, HFFormat, token_classifier
from lmtool.models.keymap import KeyMap, encoder_pairs
from lmtool.nn.block_sparse import BlockPattern, Blocks
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.layout import Full, Mask
from lmtool.types import Packed


class Bigbird(BertLike):
    """The encoder without heads."""

    config: BigbirdConfig
    head_activation = "gelu_tanh"
    pooler_activation = "gelu_tanh"

    def __init__(self, config: BigbirdConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config, "gelu_tanh") for _ in range(config.num_layers)])

    @property
    def blocks(self) -> BlockPattern:
        """The pattern of the first layer. The seed of each further layer is larger by 1."""
        config = self.config
        return BlockPattern(
            config.block_size, config.random_blocks, config.num_heads, config.pattern_seed, config.random_plan
        )

    def mask(self, number: int, packed: Packed) -> Mask:
        blocks = self.blocks
        if max(packed.lengths, default=0) <= blocks.longest_dense:
            return Full()
        return Blocks(replace(blocks, seed=blocks.seed + number), packed.lengths, self.ahead)

    def attended_tokens(self, number: int, length: float) -> float:
        return self.blocks.attended_tokens(length)

    def diagram(self, length: int) -> list[tuple[str, str]]:
        return self.blocks.diagram(length)


KEYS = KeyMap(
    (
        *encoder_pairs("bert"),
        *MASKED_LM_PAIRS,
        # The pooler of the text classifier. The model's own pooler, with another activation, is not converted.
        ("heads.pooler.dense", "classifier.dense"),
        ("heads.classifier.output", "classifier.out_proj"),
    )
)
HF_FORMAT = HFFormat(
    model="bigbird",
    title="BigBird",
    keys=KEYS,
    tied=TIED,
    classes=(
        replace(token_classifier("BigBirdForTokenClassification"), unread=("bert.pooler",)),
        HFClass("BigBirdForSequenceClassification", ("pooler", "classifier"), unread=("bert.pooler",)),
        HFClass("BigBirdForMaskedLM", ("masked_lm",), predicts=True, unread=("bert.pooler",)),
        HFClass("BigBirdModel", prefix=""),
    ),
    unsupported={
        "BigBirdForQuestionAnswering": "it has a feed-forward layer before its output, and hides the question from it",
        "BigBirdForMultipleChoice": "its pooler has another activation than the family's classifier",
    },
    prefix="bert.",
    outside_prefixes=("cls.", "classifier.", "qa_classifier."),
    unread_suffixes=("position_ids",),
    fields={
        **ENCODER_FIELDS,
        "block_size": ("block_size", 64),
        "num_random_blocks": ("random_blocks", 3),
        "vocab_size": ("vocab_size", 50358),
        "max_position_embeddings": ("max_positions", 4096),
    },
    required_values={
        "hidden_act": "gelu_new",
        "attention_type": "block_sparse",
        "use_bias": True,
        "rescale_embeddings": False,
    },
    supported_values={
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
    },
    lmtool_constants={"pattern_seed": 0, "random_plan": "transformers"},
)
