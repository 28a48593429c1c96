"""Every kind of positions against the formulas of its paper, in attention and in whole models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as turn_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves
from transformers.models.t5.modeling_t5 import T5Attention

from lmtool.config.registry import build, entries, names
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.nn.attention import SelfAttention, attend
from lmtool.nn.configs import (
    ConcatenatedPositionsConfig,
    PositionsConfig,
    RotaryPositionsConfig,
    ShawPositionsConfig,
    T5PositionsConfig,
)
from lmtool.nn.context import Context
from lmtool.nn.dropout import DeviceRng, TokenRng, name_dropouts, token_keys
from lmtool.nn.layout import Causal, Full, Layout, Mask
from lmtool.nn.positions import Alibi, Learned, Position, PositionSizes, Rotary, Shaw, Sinusoidal, T5Buckets
from lmtool.types import Packed

HEADS, SIZE = 3, 8
SIZES = {
    "vocab_size": 61, "num_layers": 2, "hidden_size": HEADS * SIZE, "num_heads": HEADS, "feedforward_size": 32,
    "max_positions": 64, "initializer_std": 0.4,
}  # fmt: skip
KINDS: dict[str, PositionsConfig] = {entry.name: entry.config() for entry in entries("model/positions")}
TREES = {name for name, config in KINDS.items() if config.reads_trees}  # tests/nn/test_tree_positions.py
KINDS = {name: config for name, config in KINDS.items() if name not in TREES}
KINDS |= {
    "shaw": ShawPositionsConfig(clip=3),
    "t5": T5PositionsConfig(buckets=8, max_distance=20),
    "interleaved": RotaryPositionsConfig(layout="interleaved"),
}
RELATIVE = ("shaw", "t5", "rotary", "interleaved", "alibi", "none")


def position_of(kind: str, causal: bool = False) -> Position:
    torch.manual_seed(1)
    position = build(KINDS[kind], PositionSizes(64, HEADS * SIZE, HEADS, SIZE, causal)).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    return position


def packed_of(*lengths: int) -> Packed:
    tokens = torch.randint(61, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    return Packed(tokens, lengths)


def shifted(packed: Packed, mask: Mask, position: Position, by: int) -> Context:
    """The context of a batch whose positions are shifted by `by`."""
    context = Context.of(packed, mask, position)
    for tile in context.layout.tiles:
        for name in ("query_positions_RL", "key_positions_RK"):
            tile.__dict__[name] = getattr(tile, name) + by
    return replace(context, positions_T=context.positions_T + by)


def test_all_kinds_of_positions_are_covered() -> None:
    assert set(KINDS) == {*names("model/positions"), "interleaved"} - TREES
    assert {"learned", "concatenated", "sinusoidal", *RELATIVE} == set(KINDS)


@pytest.mark.parametrize("mask", [Full(), Causal()])
@pytest.mark.parametrize("kind", KINDS)
def test_relative_positions_are_shift_invariant(kind: str, mask: Mask) -> None:
    torch.manual_seed(0)
    attention, position = SelfAttention(HEADS * SIZE, HEADS, 0.0).double(), position_of(kind)
    packed, x = packed_of(5, 21, 33), torch.randn(59, HEADS * SIZE, dtype=torch.float64)
    results = []
    for by in (0, 37):
        context = shifted(packed, mask, position, by)
        results.append(attention(position.embed(x, context.positions_T % 64), context))
    same = torch.allclose(*results, rtol=0, atol=1e-12)
    assert same == (kind in RELATIVE)


def test_encoder_without_positions_is_permutation_equivariant() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    packed = packed_of(20)
    for kind in KINDS:
        model = build(BertConfig(**SIZES, positions=KINDS[kind]), 0).double()
        turned = model(Packed(packed.tokens[order], (20,)))
        assert torch.allclose(model(packed)[order], turned, rtol=0, atol=1e-10) == (kind == "none"), kind


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_matches_the_whole_text(kind: str) -> None:
    model = build(GptConfig(**SIZES, positions=KINDS[kind]), 0).double()
    packed = packed_of(40, 23)
    whole = model(packed).split((40, 23))
    cache, pieces = model.new_cache(2, 48), ([], [])
    for first, second in (
        ((0, 7), (0, 1)),
        ((7, 8), (1, 2)),
        ((8, 8), (2, 20)),
        ((8, 39), (20, 22)),
        ((39, 40), (22, 23)),
    ):
        parts = (packed.tokens[:40][slice(*first)], packed.tokens[40:][slice(*second)])
        lengths = tuple(len(part) for part in parts)
        for piece, hidden in zip(
            pieces, model(Packed(torch.cat(parts), lengths), cache=cache).split(lengths), strict=True
        ):
            piece.append(hidden)
    for piece, wanted in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.cat(piece), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [BertConfig, GptConfig])
def test_packed_matches_separate_texts_and_trains_all_parameters(config, kind: str) -> None:
    model = build(config(**SIZES, positions=KINDS[kind]), 0).double()
    packed = packed_of(30, 1, 17, 40)
    together = model(packed)
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        alone = model(Packed(packed.tokens[start : start + length], (length,)))
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-10)
    together.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    learned = {name for name, _ in model.named_parameters() if name.startswith("embed.position.")}
    tables = {
        "learned": {"weight"},
        "concatenated": {"weight", "project.weight"},
        "t5": {"weight"},
        "shaw": {"keys", "values"},
    }
    assert learned == {f"embed.position.{name}" for name in tables.get(kind, ())}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_dropout_depends_on_the_token(kind: str) -> None:
    torch.manual_seed(0)
    attention, position = SelfAttention(HEADS * SIZE, HEADS, 0.25).double(), position_of(kind)
    name_dropouts(attention)
    x = torch.randn(40, HEADS * SIZE, dtype=torch.float64)

    def out(x: Tensor, lengths: tuple[int, ...], examples: tuple[int, ...]) -> Tensor:
        packed, numbers = packed_of(*lengths), torch.tensor(examples)
        rng = TokenRng(token_keys(0, 1, numbers, numbers * 0, packed))
        return attention(x, Context.of(packed, Causal(), position, rng=rng))

    torch.testing.assert_close(out(x, (11, 29), (5, 6))[11:], out(x[11:], (29,), (6,)), rtol=0, atol=1e-12)
    native = [
        attention(x, Context.of(packed_of(40), Causal(), position, rng=DeviceRng(seed, torch.device("cpu"))))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(native[0], native[1]) and not torch.allclose(native[0], native[2])


def sinusoid(position: int, width: int) -> list[float]:
    """Vaswani et al. 2017, section 3.5."""
    angles = [position / 10000 ** (2 * number / width) for number in range((width + 1) // 2)]
    return [value for angle in angles for value in (math.sin(angle), math.cos(angle))][:width]


@pytest.mark.parametrize("width", [6, 7, 64])
def test_sinusoids_match_the_formula(width: int) -> None:
    places = [0, 1, 2, 511, 5_000_000]
    wanted = torch.tensor([sinusoid(place, width) for place in places], dtype=torch.float64)
    for kind, tolerance in ((torch.float64, 1e-8), (torch.float32, 2e-7)):
        table = Sinusoidal().embed(torch.zeros(len(places), width, dtype=kind), torch.tensor(places))
        torch.testing.assert_close(table, wanted.to(kind), rtol=0, atol=tolerance)


def test_shifted_sinusoids_are_a_linear_map() -> None:
    """PE(p + k) = M_k PE(p), for one matrix M_k."""
    table = Sinusoidal().embed(torch.zeros(600, 16, dtype=torch.float64), torch.arange(600))
    for step in (1, 37):
        turn = torch.linalg.lstsq(table[:-step], table[step:]).solution
        torch.testing.assert_close(table[:-step] @ turn, table[step:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (10, 17)])
@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_match_transformers(causal: bool, buckets: int, furthest: int) -> None:
    distances = torch.arange(-512, 513)
    wanted = T5Attention._relative_position_bucket(distances, not causal, buckets, furthest)
    position = T5Buckets(buckets, furthest, HEADS, causal)
    assert torch.equal(position.bucket(distances), wanted)
    q, places = torch.zeros(1, HEADS, 20, SIZE), torch.arange(20)[None]
    score = position.score(q, q, places, places)
    assert torch.equal(score[0, 2, 3, 11], position.weight[position.bucket(torch.tensor(8)), 2])


def test_alibi_slopes_and_scores() -> None:
    assert Alibi(8).slopes == tuple(2.0**-power for power in range(1, 9))
    assert Alibi(12).slopes == tuple(2.0 ** (-8 * head / 12) for head in range(1, 13))
    q, places = torch.zeros(1, 4, 10, SIZE), torch.arange(10)[None]
    score = Alibi(4).score(q, q, places, places)
    assert score.shape == (1, 4, 10, 10) and score[0, 1, 7, 2] == -5 / 16 == score[0, 1, 2, 7]
    assert not list(Alibi(4).parameters())


def test_rotary_layouts_match_transformers() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 30, HEADS, SIZE).unbind()
    angles = torch.outer(torch.arange(30).float(), 10000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE))
    places = torch.arange(30), torch.float32
    halves = torch.cat([angles, angles], -1)[None]
    wanted = turn_halves(q.transpose(0, 1)[None], k.transpose(0, 1)[None], halves.cos(), halves.sin())
    position = Rotary(SIZE)
    for mine, theirs in zip(position.rotate(q, k, position.turns(*places)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1), rtol=0, atol=1e-5)
    turned = Rotary(SIZE, layout="interleaved").rotate(q, k, position.turns(*places))
    for mine, given in zip(turned, (q, k), strict=True):
        theirs = turn_pairs(given[None], angles.sin()[None], angles.cos()[None])[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_rotary_with_odd_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a head has 5"):
        Rotary(5)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_shaw_attention_matches_the_formula(scale: float | None) -> None:
    """Shaw et al. 2018, equations 3 and 4, one pair of tokens at a time."""
    shaw, length = position_of("shaw"), 9
    q, k, v = torch.randn(3, length, HEADS, SIZE, dtype=torch.float64).unbind()
    layout = Layout.of(packed_of(length), Full())
    attended = attend(q, k, v, layout, shaw, scale)

    def row(table: Tensor, query: int, key: int) -> Tensor:
        return table[max(-3, min(3, key - query)) + 3]

    factor = SIZE**-0.5 if scale is None else scale
    for head in range(HEADS):
        for query in range(length):
            scores = [q[query, head] @ (k[key, head] + row(shaw.keys, query, key)) * factor for key in range(length)]
            weights = torch.stack(scores).softmax(0)
            values = [weights[key] * (v[key, head] + row(shaw.values, query, key)) for key in range(length)]
            torch.testing.assert_close(attended[query, head], torch.stack(values).sum(0), rtol=0, atol=1e-12)


def test_shaw_has_one_row_per_clipped_distance() -> None:
    """There are 2k + 1 rows, of which a text of two tokens uses three. With k = 2, the distance from 4 to 1 is -2."""
    shaw = Shaw(2, SIZE)
    assert shaw.keys.shape == shaw.values.shape == (5, SIZE)
    q = torch.ones(1, 1, 5, SIZE)
    places = torch.arange(5)[None]
    shaw.score(q, q, places, places)[0, 0, 4, 1].backward()
    assert shaw.keys.grad.any(1).tolist() == [True, False, False, False, False]
    for length, met in ((2, 3), (3, 5), (30, 5)):
        shaw.zero_grad()
        x = torch.randn(length, 1, SIZE)
        attend(x, x, x, Layout.of(packed_of(length), Full()), shaw).square().sum().backward()
        assert int(shaw.values.grad.any(1).sum()) == met


def test_concatenated_positions_are_a_map_of_both_vectors() -> None:
    """The same as adding the position's vector times the last P columns of the map."""
    position = build(ConcatenatedPositionsConfig(size=5), PositionSizes(8, 6, 1, 6, True, offset=2)).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    assert position.weight.shape == (10, 5) and position.project.weight.shape == (6, 11)
    x, places = torch.randn(3, 6, dtype=torch.float64), torch.tensor([0, 1, 7])
    tokens_map, places_map = position.project.weight.split((6, 5), 1)
    wanted = x @ tokens_map.T + position.weight[places + 2] @ places_map.T
    torch.testing.assert_close(position.embed(x, places), wanted)


def test_rows_before_the_offset_are_unused() -> None:
    table = Learned(8, 6, offset=2)
    assert table.weight.shape == (10, 6)
    out = table.embed(torch.zeros(3, 6), torch.tensor([0, 1, 7]))
    assert torch.equal(out, table.weight[torch.tensor([2, 3, 9])])
    out.sum().backward()
    assert not table.weight.grad[:2].any()


def turned_by(position: Rotary, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The angles (P, D/2) by which a rotary position turns, from 0 to 2 pi, and how much it lengthens."""
    turns = position.turns(torch.tensor(positions), torch.float64)
    cosine, sine = (part[:, 0].numpy() for part in turns)
    return np.arctan2(sine, cosine) % (2 * np.pi), np.hypot(cosine, sine)


def test_extended_rotary_positions_follow_their_papers() -> None:
    size, base, factor, trained, positions = 16, 10_000.0, 4.0, 256, [0, 1, 77, 1023]
    position = Rotary(size, base)
    before = turned_by(position, positions)
    pair = np.arange(size // 2)
    rates = base ** (-2 * pair / size)
    wavelengths = 2 * np.pi / rates
    ramp = np.clip((trained / wavelengths - 1) / (32 - 1), 0, 1)
    expected = {
        "linear": (rates / factor, 1.0),
        "ntk": ((base * factor ** (size / (size - 2))) ** (-2 * pair / size), 1.0),
        "yarn": ((1 - ramp) * rates / factor + ramp * rates, 0.1 * np.log(factor) + 1),
    }
    for extension, (expected_rates, growth) in expected.items():
        position.extend(extension, factor, trained)  # type: ignore[arg-type]
        angles, lengths = turned_by(position, positions)
        difference = (angles - np.outer(positions, expected_rates)) % (2 * np.pi)
        assert np.minimum(difference, 2 * np.pi - difference).max() < 1e-9
        assert np.allclose(lengths, growth, rtol=0, atol=1e-12)
        position.extend(extension, 1.0, trained)  # type: ignore[arg-type]
        assert np.allclose(turned_by(position, positions)[0], before[0], rtol=0, atol=1e-9)
    # ntk: the fastest pair turns as before, the slowest as with interpolation.
    ntk = expected["ntk"][0]
    assert ntk[0] == rates[0] and np.isclose(ntk[-1], rates[-1] / factor)
    assert ramp[0] == 1 and 0 < ramp[1] < 1 and ramp[-1] == 0  # all parts of the ramp are tested
    position.extend(None, factor, trained)
    assert all(
        np.array_equal(first, second) for first, second in zip(turned_by(position, positions), before, strict=True)
    )
