"""The generator of replaced-token detection: a small masked language model, which fills the masks.

Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators", ICLR 2020.
The generator and the model share their embeddings (section 3.2). If their widths differ, the generator projects the
shared embeddings to its own width, as in google-research/electra.

With sharing=gdes, gradient-disentangled embedding sharing (He, Gao, Chen, "DeBERTaV3", ICLR 2023), the model's token
table is E_G + E_delta, where E_G is the generator's table, which gets no gradients from the model.

Shape letters: T tokens, M masked positions, H hidden width of the model, G hidden width of the generator, V vocabulary,
W width of the token table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.base import Backbone
from lmtool.models.heads.lm import MaskedLMHead, masked_lm_head
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Position
from lmtool.objectives.configs import RtdConfig
from lmtool.types import Packed

DELTA = "objective.sharing.delta"
"""The name of E_delta in a checkpoint. The model's own table is stored as the sum E_G + E_delta, from which finetuning
starts."""


class TableDelta(nn.Module):
    """The parameter E_delta (V, W), initialized with zeros."""

    def __init__(self, rows: int, width: int, device: torch.device):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(rows, width, device=device))


class DisentangledTable(nn.Module):
    """The model's token table E_G + E_delta under gradient-disentangled sharing. It has no parameters of its own.
    generator: the generator's token table, E_G. table_delta: the module of E_delta."""

    def __init__(self, generator: nn.Embedding, table_delta: TableDelta):
        super().__init__()
        # A tuple, so that PyTorch does not register these modules here: they belong to the generator and to `sharing`.
        self._tables = generator, table_delta

    @property
    def num_embeddings(self) -> int:
        return self._tables[0].num_embeddings

    @property
    def weight(self) -> Tensor:
        """The table (V, W), the sum."""
        generator, table_delta = self._tables
        return generator.weight.detach() + table_delta.delta

    def forward(self, ids_T: Tensor) -> Tensor:
        """Returns the vectors (T, W) of token ids (T,)."""
        generator, table_delta = self._tables
        return F.embedding(ids_T, generator.weight.detach()) + F.embedding(ids_T, table_delta.delta)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, metadata: object, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Loads the table. A checkpoint with gdes has E_G and E_delta under their own names. From any other checkpoint,
        the model's table becomes E_G, and E_delta becomes 0."""
        table_VW = state_dict.get(f"{prefix}weight")
        if table_VW is None:
            missing.append(f"{prefix}weight")
        elif DELTA not in state_dict:
            with torch.no_grad():
                self._tables[0].weight.copy_(table_VW)
                self._tables[1].delta.zero_()


# The submodules of an embedding that are shared. A projection to the hidden width is not shared.
_SHARED_MODULES = ("token", "position", "segment", "norm")
# Number of positions whose logits are in memory at a time.
_CHUNK_ROWS = 256


class MappedEmbeddings(nn.Module):
    """The model's embeddings, projected to the width of the generator.

    Args:
        shared: The embeddings of the model.
        embeddings: The embeddings that the generator would have without sharing.
        width: The hidden width of the generator.
        device: The device of the projection.
    """

    # The interface of `Embeddings`: the generator has no virtual tokens, which only tuning methods add.
    virtual = None
    virtual_count = 0

    def __init__(self, shared: Embeddings, embeddings: Embeddings, width: int, device: torch.device):
        super().__init__()
        self.shared = shared
        self.project = nn.Linear(shared.token.weight.shape[1], width, device=device)
        # Positions that act in the attention depend on the number of heads, so they are not shared.
        self.position = shared.position if _embeds(shared.position) else embeddings.position

    @property
    def token(self) -> nn.Embedding:
        """The shared token table."""
        return self.shared.token

    @property
    def norm(self) -> nn.Module | None:
        """The shared norm."""
        return self.shared.norm

    @property
    def dropout(self) -> Dropout:
        """The dropout after the shared norm."""
        return self.shared.dropout

    def tokens(self, ids_T: Tensor) -> Tensor:
        """Returns the vectors (T, W) of token ids (T,)."""
        return self.shared.tokens(ids_T)

    def finish(self, vectors_TH: Tensor, packed: Packed, positions_T: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the inputs (T, G) of the generator's first layer, see `Embeddings.finish`."""
        return self.project(self.shared.finish(vectors_TH, packed, positions_T, rng))


def _embeds(position: nn.Module) -> bool:
    """Returns whether a module of positions has learned vectors that are added to the token vectors."""
    return not (isinstance(position, Position) and position.scores) and any(True for _ in position.parameters())


def build_generator(config: RtdConfig, model: Backbone, seed: int) -> nn.ModuleDict:
    """Builds the networks of the generator. With training=joint, embeddings are shared as configured.

    Args:
        config: The configuration of replaced-token detection.
        model: The model, whose family the generator belongs to.
        seed: The seed that initializes the weights.

    Returns:
        The modules by name: `generator`, a backbone with a fraction of the model's widths and layers; `masked_lm`, its
        head; with sharing=gdes also `sharing`, which has E_delta.
    """
    generator: Backbone = build(model.config.scaled(config.generator_size, config.generator_layers), seed)
    device = next(model.parameters()).device
    generator.to(device)
    # Initial weights depend on the names of parameters. With the names of the model, a generator of the same size would
    # be initialized with the same weights as the model.
    generator.initialize(generator, seed, "objective.generator.")
    networks: dict[str, nn.Module] = {"generator": generator}
    if config.training == "joint" and config.sharing == "tied":
        _share_embeddings(generator, model, seed, device)
    if config.training == "joint" and config.sharing == "gdes":
        networks["sharing"] = _disentangle(generator, model, device)
    networks["masked_lm"] = masked_lm_head(generator, config.enhanced_decoder).to(device)
    model.initialize(networks["masked_lm"], seed, "objective.masked_lm.")
    return nn.ModuleDict(networks)


def _disentangle(generator: Backbone, model: Backbone, device: torch.device) -> TableDelta:
    """Replaces the model's token table by E_G + E_delta, where E_G is initialized with the model's table.

    Returns E_delta. Raises UserError if the widths of the two tables differ.
    """
    model_table, generator_table = model.embed.token.weight, generator.embed.token.weight
    if model_table.shape != generator_table.shape:
        raise UserError(
            f"objective.sharing=gdes needs token tables of the same width, but the generator's table has width "
            f"{generator_table.shape[1]} and the model's table has width {model_table.shape[1]}",
            "set objective.generator_size=1 (and objective.generator_layers=0.5), or objective.sharing=tied",
        )
    if not model_table.is_meta:
        with torch.no_grad():
            generator_table.copy_(model_table)
    table_delta = TableDelta(model_table.shape[0], model_table.shape[1], device)
    model.embed.token = DisentangledTable(generator.embed.token, table_delta)  # type: ignore[assignment]
    return table_delta


def _share_embeddings(generator: Backbone, model: Backbone, seed: int, device: torch.device) -> None:
    """Makes the generator use the model's embeddings, with a projection if the widths of the token tables differ."""
    generator_embed, model_embed = generator.embed, model.embed
    if generator_embed.token.weight.shape != model_embed.token.weight.shape:
        mapped = MappedEmbeddings(model_embed, generator_embed, generator.hidden_size, device)
        generator.initialize(mapped.project, seed, "objective.generator.embed.project.")
        generator.embed = mapped  # type: ignore[assignment]
        return
    for name in _SHARED_MODULES:
        module = getattr(model_embed, name, None)
        if module is not None and (name != "position" or _embeds(module)):
            setattr(generator_embed, name, module)


def start_from_generator(model: Backbone, generator: Backbone) -> list[str]:
    """Initializes the model with the generator's weights, for two-stage training (section 3.2). Copies every tensor
    whose name and shape agree; if the generator has the size of the model, these are all tensors. Returns their
    names."""
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
    head: MaskedLMHead, hidden_MG: Tensor, table_VW: Tensor, uniform_M: Tensor, vocab_size: int
) -> Tensor:
    """Samples a token (M,) for each position from the probabilities that the generator's head predicts.

    Args:
        head: The head of the generator.
        hidden_MG: The generator's states at the positions.
        table_VW: The token table of the generator.
        uniform_M: A random number in [0, 1) for each position.
        vocab_size: The number of tokens. The rows of the table after these are padding.
    """
    samples = [torch.zeros(0, dtype=torch.int64, device=hidden_MG.device)]
    for hidden, uniform in zip(hidden_MG.split(_CHUNK_ROWS), uniform_M.split(_CHUNK_ROWS), strict=True):
        samples.append(sample_from(head(hidden, table_VW)[:, :vocab_size], uniform))
    return torch.cat(samples)


def sample_from(logits_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """Samples a class (M,) from each row of logits: the first class whose cumulative probability exceeds the random
    number (inverse transform sampling)."""
    cumulative_MV = logits_MV.float().softmax(-1).cumsum(-1)
    thresholds = uniform_M.to(cumulative_MV)[:, None] * cumulative_MV[:, -1:]
    samples = torch.searchsorted(cumulative_MV, thresholds, right=True)[:, 0]
    return samples.clamp_(max=logits_MV.shape[1] - 1)


@dataclass(frozen=True)
class GeneratorSamples:
    """A text with sampled tokens, and statistics of the distributions that they were sampled from, for `lmtool
    inspect`.

    Attributes:
        filled: The text with the sampled tokens.
        replaced_probability_M: The probability that a sample differs from the original token.
        surprise_M: The negative log-probability of the sample at each masked position, in nats.
        entropy_M: The expectation of `surprise_M`, which is the entropy of the distribution.
        variance_M: The variance of `surprise_M`.
        bound: The maximum deviation of a surprise from its expectation.
    """

    filled: Packed
    replaced_probability_M: Tensor
    surprise_M: Tensor
    entropy_M: Tensor
    variance_M: Tensor
    bound: float

    @classmethod
    def from_states(
        cls, filled: Packed, head: MaskedLMHead, hidden_MG: Tensor, table_VW: Tensor, sampled_M: Tensor,
        labels_M: Tensor, vocab_size: int,
    ) -> GeneratorSamples:  # fmt: skip
        """Computes the statistics in double precision, because large sums are compared with narrow intervals. filled:
        the text with the samples. sampled_M: the samples. labels_M: the original tokens. The other arguments are those
        of `sample_tokens`."""
        columns, bound = [torch.zeros(0, 4, dtype=torch.float64, device=hidden_MG.device)], 0.0
        for hidden, sampled, labels in zip(
            *(tensor.split(_CHUNK_ROWS) for tensor in (hidden_MG, sampled_M, labels_M)), strict=True
        ):
            surprise_MV = -head(hidden, table_VW)[:, :vocab_size].double().log_softmax(-1)
            probability_MV = (-surprise_MV).exp()
            entropy = (probability_MV * surprise_MV).sum(-1)
            variance = (probability_MV * (surprise_MV - entropy[:, None]) ** 2).sum(-1)
            sample_surprise, label_surprise = (surprise_MV.gather(1, ids[:, None])[:, 0] for ids in (sampled, labels))
            columns.append(torch.stack([1 - (-label_surprise).exp(), sample_surprise, entropy, variance], dim=1))
            bound = max(bound, float((surprise_MV - entropy[:, None]).abs().max()))
        replaced, surprise, entropy, variance = torch.cat(columns).unbind(1)
        return cls(filled, replaced, surprise, entropy, variance, bound)
