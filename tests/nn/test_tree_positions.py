"""Positions in a dependency tree: depths and distances compared with a plain search, packed texts, and all encoders."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.data.trees import ANCESTORS, NoTree, numbers_of_heads, paths_from_root
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig
from lmtool.models.encoder_configs import AlbertConfig, DistilbertConfig, ElectraConfig, ModernbertConfig, RobertaConfig
from lmtool.nn.attention import reference_attention
from lmtool.nn.configs import TreeDepthPositionsConfig, TreeDistancePositionsConfig
from lmtool.nn.layout import Full, Layout
from lmtool.nn.positions import PositionSizes, tree_distances
from lmtool.nn.tiled import tiled_attention
from lmtool.types import Packed

SIZES = {
    "vocab_size": 50, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48, "max_positions": 64,
    "attention_dropout": 0.0, "dropout": 0.0,
}  # fmt: skip
KINDS = [
    TreeDepthPositionsConfig(),
    TreeDepthPositionsConfig(deepest=2, sequence="none"),
    TreeDistancePositionsConfig(),
    TreeDistancePositionsConfig(clip=2, sequence="shaw"),
    TreeDistancePositionsConfig(sequence="none"),
]


def random_heads(words, draws):
    """Heads as in CoNLL-U of a random tree whose words are in a random order."""
    order = draws.permutation(words)
    heads = np.zeros(words, dtype=int)
    for number in range(1, words):
        heads[order[number]] = order[draws.integers(number)] + 1
    return heads.tolist()


def searched_distances(heads):
    """Numbers of edges by a breadth-first search from each word."""
    neighbors = {word: [] for word in range(len(heads))}
    for word, head in enumerate(heads):
        if head:
            neighbors[word].append(head - 1)
            neighbors[head - 1].append(word)
    rows = []
    for start in neighbors:
        found, queue = {start: 0}, deque([start])
        while queue:
            word = queue.popleft()
            for other in neighbors[word]:
                if other not in found:
                    found[other] = found[word] + 1
                    queue.append(other)
        rows.append([found[word] for word in range(len(heads))])
    return np.array(rows)


def test_depths_and_distances_of_random_trees_equal_a_search():
    draws = np.random.default_rng(0)
    for _ in range(40):
        heads = random_heads(int(draws.integers(1, 25)), draws)
        paths = torch.from_numpy(paths_from_root(numbers_of_heads(heads, len(heads))))
        wanted = searched_distances(heads)
        assert np.array_equal((paths >= 0).sum(-1) - 1, wanted[heads.index(0)])
        word_of = np.repeat(np.arange(len(heads)), draws.integers(1, 4, len(heads)))  # subwords share their word's node
        tokens = torch.cat([torch.full((1, paths.shape[1]), -1, dtype=torch.int32), paths[torch.from_numpy(word_of)]])
        distances, real = tree_distances(tokens[None], tokens[None])
        assert np.array_equal(distances[0, 1:, 1:], wanted[word_of][:, word_of])
        assert real[0, 1:, 1:].all() and not real[0, 0].any() and not real[0, :, 0].any()


@pytest.mark.parametrize(
    ("heads", "word", "problem"),
    [
        ([2, 3, 2], 1, "word 2 depends on itself"),  # the second and the third word are the cycle
        ([0, 3, 2], 1, "depends on itself"),
        ([0, 2], 1, "depends on itself"),
        ([0, 0, 1], 1, "2 roots"),
        ([0, 4, 1], 1, "the head of word 2 is 4, not a number from 0 to 3"),
        (["0", "_", "1"], 1, "the head of word 2 is _"),
        (["0", "-1", "1"], 1, "the head of word 2 is -1"),
        ([0, 1], 0, "3 words and 2 heads"),
    ],
)
def test_heads_that_are_no_tree_are_refused(heads, word, problem):
    with pytest.raises(NoTree, match=problem) as raised:
        numbers_of_heads(heads, 3 if "3 words" in problem else len(heads))
    assert raised.value.word == word


def batch(lengths, seed=0, levels=24):
    """Texts whose first and last token belong to no word, and whose words have two tokens each."""
    draws = np.random.default_rng(seed)
    columns = []
    for length in lengths:
        words = (length - 2) // 2
        paths = paths_from_root(numbers_of_heads(random_heads(words, draws), words), levels)
        none = np.full((1, levels), -1, dtype=np.int32)
        columns.append(np.concatenate([none, np.repeat(paths, 2, axis=0), none]))
    tokens = torch.from_numpy(draws.integers(0, 50, sum(lengths)))
    return Packed(tokens, tuple(lengths), {ANCESTORS: torch.from_numpy(np.concatenate(columns))})


def texts_of(packed):
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        part = slice(start, start + length)
        yield Packed(packed.tokens[part], (length,), {ANCESTORS: packed.columns[ANCESTORS][part]})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_texts_equal_single_texts(kind):
    model = build(BertConfig(**SIZES, positions=kind), 0).eval()
    for name, parameter in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    packed = batch([10, 34, 12, 40, 4])
    single = torch.cat([model(text) for text in texts_of(packed)])
    torch.testing.assert_close(model(packed), single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if isinstance(kind, TreeDistancePositionsConfig)])
def test_distances_equal_the_plain_attention_and_a_formula(kind):
    position = build(kind, PositionSizes(64, 32, 2, 16, False))
    packed = batch([10, 34, 12])
    bound, layout = position.of_batch(packed), Layout.of(packed, Full())
    q, k, v = torch.randn(3, len(packed.tokens), 2, 16, generator=torch.Generator().manual_seed(0))
    tiled = tiled_attention(q, k, v, layout, bound, None, 0.0, None)
    torch.testing.assert_close(tiled, reference_attention(q, k, v, layout, bound), rtol=1e-4, atol=1e-5)
    if kind.sequence == "shaw":
        return
    # The first text, token by token.
    paths = packed.columns[ANCESTORS][:10]
    vectors = []
    for query in range(10):
        rows = []
        for key in range(10):
            left, right = (set(path[path >= 0].tolist()) for path in (paths[query], paths[key]))
            distance = len(left ^ right) * (-1 if key < query else 1)
            rows.append(max(-kind.clip, min(kind.clip, distance)) + kind.clip if left and right else 2 * kind.clip + 1)
        scores = torch.einsum("ad,kad->ak", q[query], k[:10] + position.keys[rows][:, None]) / 4
        weights = scores.softmax(-1)
        vectors.append(torch.einsum("ak,kad->ad", weights, v[:10] + position.values[rows][:, None]))
    torch.testing.assert_close(tiled[:10], torch.stack(vectors), rtol=1e-4, atol=1e-5)


ENCODERS = {
    "bert": (BertConfig, {}),
    "roberta": (RobertaConfig, {}),
    "albert": (AlbertConfig, {}),
    "distilbert": (DistilbertConfig, {}),
    "electra": (ElectraConfig, {}),
    "modernbert": (ModernbertConfig, {}),
}


@pytest.mark.parametrize("kind", [TreeDepthPositionsConfig(), TreeDistancePositionsConfig()])
@pytest.mark.parametrize("family", ENCODERS)
def test_every_encoder_reads_the_tree(family, kind):
    config, fields = ENCODERS[family]
    model = build(config(**{**SIZES, **fields}, positions=kind), 0).eval()
    packed = batch([22, 30])
    other = replace(packed, columns={ANCESTORS: batch([22, 30], seed=1).columns[ANCESTORS]})
    assert not torch.allclose(model(packed), model(other), atol=1e-4)
    model(packed).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.embed.position.parameters())


def test_a_text_without_a_tree_is_refused():
    model = build(BertConfig(**SIZES, positions=TreeDepthPositionsConfig()), 0)
    with pytest.raises(UserError, match="these texts have none"):
        model(replace(batch([10]), columns={}))
