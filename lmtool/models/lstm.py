"""An LSTM language model that is pretrained and then finetuned: Dai and Le, "Semi-supervised Sequence Learning",
NeurIPS 2015.

          token
             |
          dropout
             |
    +--------+--------+
    |      LSTM  -----|--> to the next token of the same text
    |        |        |                                         x num_layers
    |     dropout     |
    +--------+--------+
             |
          hidden

The output layer is untied. A classifier reads the last token's state (section 2). The cells are those of torch.nn.LSTM
with one bias.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from lmtool.models.base import Decoder, VocabularyHead
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.nn.cache import Cache, Carried
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.initialization import Draw, normal_by_inputs
from lmtool.nn.positions import Position
from lmtool.nn.recurrent import LstmCell, RecurrentLayer, SegmentStates, State, StateCache
from lmtool.nn.stack import Tap
from lmtool.types import Packed

_PARTS = ("given", "cell")  # names of the two parts of a layer's state: its last output and its cell


class LstmDecoder(Decoder):
    """The decoder without its head."""

    config: LstmConfig
    vocabulary_head = VocabularyHead(tied=False)

    def __init__(self, config: LstmConfig):
        widths = [config.embedding_size] + [config.hidden_size] * config.num_layers
        super().__init__(
            config,
            Embeddings(config.vocab_size, config.embedding_size, Position(), config.dropout),
            [RecurrentLayer(LstmCell(input_width, width), config.dropout) for input_width, width in pairwise(widths)],
        )

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """Returns hidden states as every decoder. carried: the states before and after each document, for text in
        segments; no gradient flows through them (section 2: truncated back-propagation)."""
        if carried is None:
            return super().forward(packed, rng, cache, read_M, tap)
        cache = self.new_cache(len(packed.lengths), max(packed.lengths))
        layer_states = [
            SegmentStates(State(*(carried.before[f"{part}_{number}"] for part in _PARTS)))
            for number in range(len(self.layers))
        ]
        cache.layers = [*layer_states]
        hidden_TH = super().forward(packed, rng, cache, read_M, tap)
        carried.after = {
            f"{part}_{number}": tensor
            for number, state in enumerate(layer_states)
            for part, tensor in zip(_PARTS, state.after, strict=True)
        }
        return hidden_TH

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        """Returns zeros, (lanes, H) for each part of each layer's state."""
        zeros_LH = self.embed.token.weight.new_zeros(lanes, self.hidden_size)
        return {f"{part}_{number}": zeros_LH for number in range(len(self.layers)) for part in _PARTS}

    @property
    def state_widths(self) -> tuple[int, ...]:
        return self.config.embedding_size, *super().state_widths[1:]

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        """Returns a cache with the state of each layer instead of keys and values."""
        return Cache(len(self.layers), documents, capacity + embed.virtual_count, StateCache)

    def initial_draw(self) -> Draw:
        return normal_by_inputs(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Also opens the forget gates of new cells."""
        super().initialize(module, seed, prefix)
        for cell in module.modules():
            if isinstance(cell, LstmCell) and not cell.bias.is_meta:
                cell.open_forget_gates()
