"""The small masked language model that generates the text for replaced-token detection.

Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020.
Embeddings are shared with the model (section 3.2): the same parameters, with a separate projection to the generator's
width if the family has a single width, as in google-research/electra.

Shape letters: T tokens, M masked positions, H hidden width of the model, G of the generator, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import MaskedLMHead, masked_lm_head
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.embeddings import Embeddings
from lmtool.objectives.configs import RtdConfig
from lmtool.types import Packed

DELTA = "objective.sharing.delta"
"""The name of E_delta in a checkpoint. The model's table is stored as the sum, from which finetuning starts."""


class TableDelta(nn.Module):
    """E_delta. `delta`: (V, W), zeros."""

    def __init__(self, rows: int, width: int, device: torch.device):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(rows, width, device=device))


class DisentangledTable(nn.Module):
    """The model's token table under gradient-disentangled sharing: the parameters belong to the generator and to
    `difference`, and are named there."""

    def __init__(self, generator: nn.Embedding, difference: TableDelta):
        super().__init__()
        self._parts = generator, difference  # in a tuple: they are registered elsewhere

    @property
    def num_embeddings(self) -> int:
        return self._parts[0].num_embeddings

    @property
    def weight(self) -> Tensor:
        """(V, W) the sum."""
        generator, difference = self._parts
        return generator.weight.detach() + difference.delta

    def forward(self, ids_T: Tensor) -> Tensor:
        """(T,) ids to (T, W)."""
        generator, difference = self._parts
        return F.embedding(ids_T, generator.weight.detach()) + F.embedding(ids_T, difference.delta)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, metadata: object, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """A checkpoint with this sharing has both parts; the table of any other initializes both."""
        table_VW = state_dict.get(f"{prefix}weight")
        if table_VW is None:
            missing.append(f"{prefix}weight")
        elif DELTA not in state_dict:
            with torch.no_grad():
                self._parts[0].weight.copy_(table_VW)
                self._parts[1].delta.zero_()


# The shared parts of an embedding, without projections to the hidden width.
_SHARED = ("token", "position", "segment", "norm")
# Rows of logits in memory at a time.
_ROWS = 256


class MappedEmbeddings(nn.Module):
    """The model's embeddings, projected to the width of the generator. Virtual tokens are added by tuning."""

    virtual = None
    virtual_count = 0

    def __init__(self, shared: Embeddings, own: Embeddings, width: int, device: torch.device):
        super().__init__()
        self.shared = shared
        self.project = nn.Linear(shared.token.weight.shape[1], width, device=device)
        # Positions within the attention depend on its heads, so the generator has its own.
        self.position = shared.position if _embeds(shared.position) else own.position

    @property
    def token(self) -> nn.Embedding:
        """The shared table."""
        return self.shared.token

    @property
    def norm(self) -> nn.Module | None:
        """The shared norm, with its dropout."""
        return self.shared.norm

    @property
    def dropout(self) -> Dropout:
        return self.shared.dropout

    def tokens(self, ids_T: Tensor) -> Tensor:
        """(T,) ids to (T, H)."""
        return self.shared.tokens(ids_T)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """(T, H) to (T, G)."""
        return self.project(self.shared.finish(vectors_TH, packed, positions_T, rng))


def _embeds(position: nn.Module) -> bool:
    """Whether positions are learned vectors added to those of the tokens."""
    return not getattr(position, "scores", False) and any(True for _ in position.parameters())


def build_generator(config: RtdConfig, model: Backbone, seed: int) -> nn.ModuleDict:
    """`generator`, a backbone of the model's family with a fraction of its widths and layers, and `masked_lm`, its
    head. Under training=joint the embeddings are shared as configured."""
    generator: Backbone = build(model.config.scaled(config.generator_size, config.generator_layers), seed)
    device = next(model.parameters()).device
    generator.to(device)
    # Initialized under its own name: at the model's size it would equal the model.
    generator.initialize(generator, seed, "objective.generator.")
    parts: dict[str, nn.Module] = {"generator": generator}
    if config.training == "joint" and config.sharing == "tied":
        _share_embeddings(generator, model, seed, device)
    if config.training == "joint" and config.sharing == "gdes":
        parts["sharing"] = _disentangle(generator, model, device)
    parts["masked_lm"] = masked_lm_head(generator, config.enhanced_decoder).to(device)
    model.initialize(parts["masked_lm"], seed, "objective.masked_lm.")
    return nn.ModuleDict(parts)


def _disentangle(generator: Backbone, model: Backbone, device: torch.device) -> TableDelta:
    """Makes the model read the generator's token table, initialized as the model's. UserError if the widths differ."""
    own, generator_table = model.embed.token.weight, generator.embed.token.weight
    if own.shape != generator_table.shape:
        raise UserError(
            f"objective.sharing=gdes adds to the generator's token table, which has width {generator_table.shape[1]}; "
            f"the model's has {own.shape[1]}",
            "set objective.generator_size=1 (and objective.generator_layers=0.5), or objective.sharing=tied",
        )
    if not own.is_meta:
        with torch.no_grad():
            generator_table.copy_(own)
    difference = TableDelta(own.shape[0], own.shape[1], device)
    model.embed.token = DisentangledTable(generator.embed.token, difference)  # type: ignore[assignment]
    return difference


def _share_embeddings(generator: Backbone, model: Backbone, seed: int, device: torch.device) -> None:
    own, shared = generator.embed, model.embed
    if own.token.weight.shape != shared.token.weight.shape:
        mapped = MappedEmbeddings(shared, own, generator.hidden_size, device)
        generator.initialize(mapped.project, seed, "objective.generator.embed.project.")
        generator.embed = mapped  # type: ignore[assignment]
        return
    for name in _SHARED:
        part = getattr(shared, name, None)
        if part is not None and (name != "position" or _embeds(part)):
            setattr(own, name, part)


def start_from_generator(model: Backbone, generator: Backbone) -> list[str]:
    """Copies the generator's tensors into the model if names and shapes match, and returns their names. Two-stage
    training (section 3.2): with a generator of the model's size, all of them."""
    sources = dict(generator.named_parameters())
    copied = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sources and sources[name].shape == parameter.shape:
                parameter.copy_(sources[name])
                copied.append(name)
    return copied


@torch.no_grad()
def sample_tokens(
    head: MaskedLMHead, hidden_MG: Tensor, table_VW: Tensor, uniform_M: Tensor, vocabulary: int
) -> Tensor:
    """(M,) a token for each position, sampled from the head's probabilities: where their cumulative sum exceeds the
    random number.

    uniform_M: in [0, 1). vocabulary: larger ids are table rows without a piece.
    """
    drawn = [torch.zeros(0, dtype=torch.int64, device=hidden_MG.device)]
    for hidden, uniform in zip(hidden_MG.split(_ROWS), uniform_M.split(_ROWS), strict=True):
        drawn.append(draw_from(head(hidden, table_VW)[:, :vocabulary], uniform))
    return torch.cat(drawn)


def draw_from(logits_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """(M,) the class of each row that contains the random number."""
    cumulative_MV = logits_MV.float().softmax(-1).cumsum(-1)
    reached = uniform_M.to(cumulative_MV)[:, None] * cumulative_MV[:, -1:]
    drawn = torch.searchsorted(cumulative_MV, reached, right=True)[:, 0]
    return drawn.clamp_(max=logits_MV.shape[1] - 1)


@dataclass(frozen=True)
class Sampled:
    """Samples and their distributions.

    filled: the text with the samples. other_M: probability that a sample is not the original token. surprise_M: -log of
    the sample's probability, in nats; entropy_M, variance_M: its expectation and variance; bound: maximum deviation
    from the expectation.
    """

    filled: Packed
    other_M: Tensor
    surprise_M: Tensor
    entropy_M: Tensor
    variance_M: Tensor
    bound: float

    @classmethod
    def of(
        cls, filled: Packed, head: MaskedLMHead, hidden_MG: Tensor, table_VW: Tensor, sampled_M: Tensor,
        labels_M: Tensor, vocabulary: int,
    ) -> Sampled:  # fmt: skip
        """Computed from the hidden states of `sample_tokens`, in double precision: large sums are compared with narrow
        intervals."""
        columns, bound = [torch.zeros(0, 4, dtype=torch.float64, device=hidden_MG.device)], 0.0
        for hidden, sampled, labels in zip(
            *(tensor.split(_ROWS) for tensor in (hidden_MG, sampled_M, labels_M)), strict=True
        ):
            surprise_MV = -head(hidden, table_VW)[:, :vocabulary].double().log_softmax(-1)
            share_MV = (-surprise_MV).exp()
            entropy = (share_MV * surprise_MV).sum(-1)
            variance = (share_MV * (surprise_MV - entropy[:, None]) ** 2).sum(-1)
            own, original = (surprise_MV.gather(1, ids[:, None])[:, 0] for ids in (sampled, labels))
            columns.append(torch.stack([1 - (-original).exp(), own, entropy, variance], dim=1))
            bound = max(bound, float((surprise_MV - entropy[:, None]).abs().max()))
        other, own, entropy, variance = torch.cat(columns).unbind(1)
        return cls(filled, other, own, entropy, variance, bound)
