"""Attention: the function that picks a kernel, and the modules that call it.

`attend` uses a variable-length kernel on CUDA where one applies, block tiles for a block mask, and tiles of documents
of similar length otherwise. `reference_attention` is the plain loop that defines the result; tests hold all paths equal
to it.

Shape letters: T query tokens, S key tokens (in cross-attention, those of the encoder), M selected tokens, A heads, D
head width, H = A*D hidden width, L queries and K keys of a document.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lmtool.nn.block_sparse import Blocks, block_attention
from lmtool.nn.context import AttentionKind, Context, EncoderState
from lmtool.nn.dropout import DeviceRng, Dropout, DropoutRng, TokenRng
from lmtool.nn.kernels import flash_attention, fused_attention, fused_attention_of, jagged_attention, kernel_for, serves
from lmtool.nn.layout import Layout
from lmtool.nn.linear import apply_linear, linear
from lmtool.nn.positions import Position, Turns
from lmtool.nn.prefix import LayerPrefix
from lmtool.nn.regions import is_plain, region
from lmtool.nn.tiled import AttentionInputs, tiled_attention


def attend(
    q_TAD: Tensor,
    k_SAD: Tensor,
    v_SAD: Tensor,
    layout: Layout,
    bias: Position | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: DropoutRng | None = None,
) -> Tensor:
    """Computes softmax(q k^T scale + bias) v within each document, as its mask allows (Vaswani et al. 2017, 3.2.1).

    bias: adds a term to the scores and, if `bias.weighs` (Shaw), a term computed from the attention weights to the
    result.
    scale: None for 1/sqrt(D). dropout: fraction of the weights that is dropped if there is a generator. rng: the
    generator of this layer's attention dropout, or None. Returns (T, A, D) in the type of q; zeros for queries whose
    document has no keys.
    """
    rate = 0.0 if rng is None else dropout
    if rate and isinstance(rng, DeviceRng):
        rng.seed()
    if isinstance(layout.mask, Blocks):
        assert bias is None
        return block_attention(q_TAD, k_SAD, v_SAD, layout, scale, rate, rng)
    if bias is None and not (rate and isinstance(rng, TokenRng)):
        kernel = kernel_for(q_TAD.device, q_TAD.dtype, q_TAD.shape[-1], rate)
        if kernel == "flash" and serves(kernel, layout):
            return flash_attention(q_TAD, k_SAD, v_SAD, layout, scale)
        if kernel == "jagged" and serves(kernel, layout):
            return jagged_attention(q_TAD, k_SAD, v_SAD, layout, scale, rate)
    return tiled_attention(q_TAD, k_SAD, v_SAD, layout, bias, scale, rate, rng)


def reference_attention(
    q_TAD: Tensor,
    k_SAD: Tensor,
    v_SAD: Tensor,
    layout: Layout,
    bias: Position | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns the result that `attend` must return, computed document by document in plain torch. For tests."""
    out_TAD = torch.zeros_like(q_TAD)
    scale = 1 / math.sqrt(q_TAD.shape[-1]) if scale is None else scale
    device = q_TAD.device
    for number, (queries, keys) in enumerate(zip(layout.query.lengths, layout.key.lengths, strict=True)):
        if not queries or not keys:
            continue
        query_begin, key_begin = layout.query.starts[number], layout.key.starts[number]
        q_ALD = q_TAD[query_begin : query_begin + queries].transpose(0, 1)
        k_AKD = k_SAD[key_begin : key_begin + keys].transpose(0, 1)
        v_AKD = v_SAD[key_begin : key_begin + keys].transpose(0, 1)
        query_positions = torch.arange(queries, device=device)[None] + layout.query_start[number]
        key_positions = torch.arange(keys, device=device)[None]
        q_ALD = q_ALD * scale
        scores_ALK = q_ALD @ k_AKD.transpose(1, 2)
        if bias is not None:
            token_bias = bias.of_tokens(
                torch.arange(query_begin, query_begin + queries, device=device)[None],
                torch.arange(key_begin, key_begin + keys, device=device)[None],
                key_positions,
            )
            scores_ALK = scores_ALK + token_bias.score(q_ALD[None], k_AKD[None], query_positions, key_positions)[0]
        document = torch.tensor([number])
        allow = layout.mask.allow(query_positions[..., None].cpu(), key_positions[:, None].cpu(), document)
        if allow is not None:
            scores_ALK = scores_ALK.masked_fill(~allow.flatten(0, -3).to(device), -torch.inf)
        weights_ALK = scores_ALK.softmax(-1)
        out_ALD = weights_ALK @ v_AKD
        if bias is not None and bias.weighs:
            out_ALD = out_ALD + token_bias.value(weights_ALK[None], query_positions, key_positions)[0]
        out_TAD[query_begin : query_begin + queries] = out_ALD.transpose(0, 1)
    return out_TAD


# For fewer tokens, concatenating the weights of three projections costs more than one product saves.
_MIN_JOINT_TOKENS = 64


# If more than this fraction of the tokens is selected, restricting attention to the selected queries saves no time.
_MAX_SUBSET = 0.5


def only(x_TH: Tensor, read_M: Tensor | None) -> Tensor:
    """Returns (M, H): the states of the tokens with the indices `read_M`; None means all tokens."""
    return x_TH if read_M is None else x_TH.index_select(0, read_M)


def joins(*projections: nn.Module) -> bool:
    """Whether several projections can be computed by one matrix product: they must be plain linear layers without
    hooks, and all or none must have a bias. A projection that was edited (LoRA) or has a hook must be called
    separately."""
    plain = [module for module in projections if is_plain(module, nn.Linear)]
    return len(plain) == len(projections) and len({module.bias is None for module in plain}) == 1


def joint_weights(*projections: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns the weights and the biases of several projections, concatenated."""
    linears = cast(tuple[nn.Linear, ...], projections)
    biases: list[Tensor] = [module.bias for module in linears if module.bias is not None]
    return torch.cat([module.weight for module in linears]), torch.cat(biases) if biases else None


def joint_projection(x_TH: Tensor, *projections: nn.Module) -> Tensor:
    """Returns several projections, concatenated: (T, sum of the widths). One product with the concatenated weights
    takes 3 to 18% less time than several products."""
    return linear(x_TH, *joint_weights(*projections))


def project(
    x_TH: Tensor,
    q_proj: nn.Module,
    k_proj: nn.Module,
    v_proj: nn.Module,
    joint: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three projections, computed by one product if possible. For few tokens, concatenating the weights
    would cost more than it saves. joint: their weights, if they are already concatenated."""
    few = not torch.is_grad_enabled() and not torch.compiler.is_compiling() and x_TH.shape[0] < _MIN_JOINT_TOKENS
    if joint is None and (few or not joins(q_proj, k_proj, v_proj)):
        return apply_linear(q_proj, x_TH), apply_linear(k_proj, x_TH), apply_linear(v_proj, x_TH)
    joint_TX = linear(x_TH, *(joint_weights(q_proj, k_proj, v_proj) if joint is None else joint))
    q, k, v = joint_TX.split([cast(nn.Linear, module).out_features for module in (q_proj, k_proj, v_proj)], dim=-1)
    return q, k, v


class MultiHead(nn.Module):
    """The four projections of multi-head attention (Vaswani et al. 2017, 3.2.2).

    head_size: None for hidden_size / num_heads. bias: whether the projections have a bias. scale: the factor of the
    scores; None for 1/sqrt(head_size) (T5 has 1). key_value_heads: the number of key and value heads, each of which is
    shared by equally many query heads (Ainslie et al. 2023); None for num_heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float,
        head_size: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        key_value_heads: int | None = None,
    ):
        super().__init__()
        width = hidden_size if head_size is None else num_heads * head_size
        self.num_heads = num_heads
        self.head_size = width // num_heads
        self.key_value_heads = num_heads if key_value_heads is None else key_value_heads
        narrow = self.head_size * self.key_value_heads
        self.dropout = Dropout(dropout)
        self.scale = scale
        self.q_proj = nn.Linear(hidden_size, width, bias)
        self.k_proj = nn.Linear(hidden_size, narrow, bias)
        self.v_proj = nn.Linear(hidden_size, narrow, bias)
        self.out_proj = nn.Linear(width, hidden_size, bias)

    kind: ClassVar[AttentionKind]
    """The name of this kind of attention in a layer."""
    table_maps: ClassVar[tuple[str, ...]] = ()
    """Names of the projections that are applied to a table of positions, once per batch, rather than to tokens."""

    def leave_out_projections(self) -> None:
        """Makes the queries, keys and values the states themselves, which the heads share among them."""
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Identity())

    def saved_for_positions(self, keys: float) -> tuple[float, float, float]:
        """Counts the values that relative positions save for the backward pass, besides queries, keys and values.

        keys: the number of keys of a query. Returns the tensors of shape (T, A, D) per query and per key, and the
        values per query and head.
        """
        return 0.0, 0.0, 0.0

    def heads(self, x_TW: Tensor) -> Tensor:
        """Splits (T, A*D) into heads, (T, A, D). Keys and values may have fewer heads than queries."""
        return x_TW.view(x_TW.shape[0], -1, self.head_size)

    def repeat_for_queries(self, x_SAD: Tensor) -> Tensor:
        """Returns the keys or values, repeated so that each query head has one."""
        queries = self.num_heads // self.key_value_heads
        return x_SAD if queries == 1 else x_SAD.repeat_interleave(queries, 1)

    def attend_and_project(
        self,
        q_TAD: Tensor,
        k_SAD: Tensor,
        v_SAD: Tensor,
        layout: Layout,
        bias: Position | None,
        context: Context,
        read_M: Tensor | None,
    ) -> Tensor:
        """Applies attention and the output projection: (T, H), or (M, H) of the tokens `read_M`. An observer receives
        the inputs."""
        k_SAD, v_SAD = self.repeat_for_queries(k_SAD), self.repeat_for_queries(v_SAD)
        observe = context.observer(self.kind)
        if observe is not None:
            observe(AttentionInputs(q_TAD, k_SAD, v_SAD, layout, bias, self.scale))
        rng = self.dropout.rng(context.rng)
        out_TAD = attend(q_TAD, k_SAD, v_SAD, layout, bias, self.scale, self.dropout.rate, rng)
        return apply_linear(self.out_proj, only(out_TAD.flatten(-2), read_M))


class SelfAttention(MultiHead):
    """Multi-head attention of a text to itself."""

    kind = "self_attn"

    @region(1, 2)  # x_TH and turns have a row per token
    def project_and_rotate(
        self,
        x_TH: Tensor,
        turns: Turns | None,
        position: Position,
        norm: nn.Module | None,
        joint: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (T, A, D): the queries, keys and values. turns: the rotations for the positions of the tokens, or
        None. norm: applied to the states first, or None. joint: see `project`."""
        x_TH = x_TH if norm is None else norm(x_TH)
        q_TAD, k_TAD, v_TAD = map(self.heads, project(x_TH, self.q_proj, self.k_proj, self.v_proj, joint))
        if turns is not None:
            q_TAD, k_TAD = position.rotate(q_TAD, k_TAD, turns)
        return q_TAD, k_TAD, v_TAD

    @region(1)
    def project_jointly(self, x_TH: Tensor, norm: nn.Module | None) -> Tensor:
        """Returns (T, 3H): queries, keys and values, concatenated."""
        return joint_projection(x_TH if norm is None else norm(x_TH), self.q_proj, self.k_proj, self.v_proj)

    @region(1, 2)
    def project_subset(self, x_TH: Tensor, read_M: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Returns (M, H): the queries of the selected tokens, and (T, 2H) the keys and values of all tokens,
        concatenated."""
        x_TH = x_TH if norm is None else norm(x_TH)
        return apply_linear(self.q_proj, only(x_TH, read_M)), joint_projection(x_TH, self.k_proj, self.v_proj)

    def forward(
        self, x_TH: Tensor, context: Context, read_M: Tensor | None = None, norm: nn.Module | None = None
    ) -> Tensor:
        """Maps (T, H) to (T, H). read_M: the flat indices of the tokens whose result is needed; the result is then (M,
        H). norm: applied to the input, or None."""
        position, rng = context.position, self.dropout.rng(context.rng)
        turns = position.turns(context.positions_T, x_TH.dtype)
        if isinstance(rng, TokenRng) and turns is None and self._can_fuse(context):
            arguments = self.num_heads, context.layout, self.scale, self.dropout.rate, rng
            if read_M is None or not 0 < len(read_M) <= _MAX_SUBSET * len(x_TH):
                out_TH = fused_attention(self.project_jointly(x_TH, norm), *arguments)
                return apply_linear(self.out_proj, only(out_TH, read_M))
            query_MX, joint_TX = self.project_subset(x_TH, read_M, norm)
            return apply_linear(self.out_proj, fused_attention_of(query_MX, joint_TX, read_M, *arguments))
        joint = None if context.cache is None else context.cache.keep(self._joint_weights)
        q_TAD, k_TAD, v_TAD = self.project_and_rotate(x_TH, turns, position, norm, joint)
        if context.cache is not None:
            k_TAD, v_TAD = context.cache.append(k_TAD, v_TAD, context.prefix)
        elif context.prefix is not None:
            k_TAD, v_TAD = context.prefix.prepend_to(k_TAD, v_TAD)
        return self.attend_and_project(q_TAD, k_TAD, v_TAD, context.layout, self.bias(position), context, read_M)

    def bias(self, position: Position) -> Position | None:
        """Returns the term added to this layer's scores, or None."""
        return position if position.scores else None

    def _joint_weights(self) -> tuple[Tensor, Tensor | None] | None:
        """Returns the concatenated weights of the three projections, for a whole generation; None if that is
        impossible, or on a GPU, whose memory may have no room for a copy."""
        projections = self.q_proj, self.k_proj, self.v_proj
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters())
        return joint_weights(*projections) if on_cpu and joins(*projections) else None

    def _can_fuse(self, context: Context) -> bool:
        """Whether nothing happens between the projections and the attention, and there is no observer."""
        layout = context.layout
        interrupted = context.position.scores or context.cache is not None or context.prefix is not None
        interrupted = interrupted or isinstance(layout.mask, Blocks)
        same_tokens = self.key_value_heads == self.num_heads and layout.key is layout.query and layout.packed
        observed = context.observer(self.kind) is not None
        return same_tokens and not interrupted and not observed and joins(self.q_proj, self.k_proj, self.v_proj)


class CrossAttention(MultiHead):
    """Attention with queries from the decoder, and keys and values from the encoder (Vaswani et al. 2017, 3.2.3).
    Positions play no part, because positions in two texts are not comparable."""

    kind = "cross_attn"

    def keys_values(self, encoded: EncoderState, prefix: LayerPrefix | None = None) -> tuple[Tensor, Tensor]:
        """Returns (S, A, D): the keys and values of the encoder's hidden states, preceded by those of a prefix if there
        is one."""
        if self in encoded.cached:
            return encoded.cached[self]
        keys_values = (
            self.heads(apply_linear(self.k_proj, encoded.hidden_SH)),
            self.heads(apply_linear(self.v_proj, encoded.hidden_SH)),
        )
        if prefix is not None:
            keys_values = prefix.prepend_to(*keys_values)
        if encoded.keep:
            encoded.cached[self] = keys_values
        return keys_values

    def forward(self, x_TH: Tensor, context: Context, read_M: Tensor | None = None) -> Tensor:
        """Maps (T, H) to (T, H). read_M: the flat indices of the tokens whose result is needed; the result is then (M,
        H). Raises ValueError if the context has no encoder output."""
        if context.encoded is None or context.cross_layout is None:
            raise ValueError("cross-attention needs an encoder output, but the context has none")
        k_SAD, v_SAD = self.keys_values(context.encoded, context.cross_prefix)
        q_TAD = self.heads(apply_linear(self.q_proj, x_TH))
        return self.attend_and_project(q_TAD, k_SAD, v_SAD, context.cross_layout, None, context, read_M)
