"""Transformer-XL against a plain implementation of its definition, one text at a time: losses, gradients, memory and
evaluation. No maintained library has this family.

Shape letters: L tokens, F tokens of memory, H width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import build
from lmtool.models.decoder_configs import TransformerXlConfig
from lmtool.models.heads.lm import AdaptiveLMHead, lm_head
from lmtool.nn.cache import Carried
from lmtool.types import Packed

SIZES = {
    "vocab_size": 61, "num_layers": 3, "hidden_size": 20, "num_heads": 4, "feedforward_size": 28, "dropout": 0.0,
    "max_positions": 96, "cutoffs": (11, 30, 900), "initializer_std": 0.3, "memory_length": 7,
    "evaluation_memory_length": 16, "clamp_distance": 9,
}  # fmt: skip


def model_of(**fields):
    torch.manual_seed(3)
    backbone = build(TransformerXlConfig(**{**SIZES, **fields}), 5)
    head = lm_head(backbone)
    backbone.initialize(head, 5, "heads.lm.")
    for parameter in [*backbone.parameters(), *head.parameters()]:
        parameter.data += 0.1 * torch.randn_like(parameter)
    return backbone.double(), head.double()


@lru_cache
def sinusoid(distance, width):
    """Dai et al. 2019, section 3.3, after Vaswani et al. 2017."""
    angles = [distance / 10000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor(
        [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles], dtype=torch.double
    )


def defined(backbone, ids_L, memories, reach=None, clamp=None):
    """(L, H) hidden states and the inputs of each layer, score by score. reach: number of tokens to attend to."""
    config = backbone.config
    heads, size = config.num_heads, config.hidden_size // config.num_heads
    x_LH = backbone.embed.token.weight[ids_L] * math.sqrt(config.hidden_size)
    read = []
    for layer, memory_FH in zip(backbone.layers, memories, strict=True):
        read.append(x_LH)
        seen = torch.cat([memory_FH, x_LH])
        attention, count = layer.self_attn, len(memory_FH)
        query, key, value = (
            x_LH @ attention.q_proj.weight.T,
            seen @ attention.k_proj.weight.T,
            seen @ attention.v_proj.weight.T,
        )
        outs = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            u, v = backbone.relative.content_bias[head], backbone.relative.place_bias[head]
            rows = []
            for i in range(len(ids_L)):
                first = 0 if reach is None else max(0, count + i - reach + 1)
                scores = []
                for j in range(first, count + i + 1):
                    distance = count + i - j if clamp is None else min(count + i - j, clamp)
                    place = attention.pos_proj.weight[part] @ sinusoid(distance, config.hidden_size)
                    scores.append((query[i, part] + u) @ key[j, part] + (query[i, part] + v) @ place)
                weights = (torch.stack(scores) / math.sqrt(size)).softmax(0)
                rows.append(weights @ value[first : count + i + 1, part])
            outs.append(torch.stack(rows))
        x_LH = layer.norm1(x_LH + torch.cat(outs, 1) @ attention.out_proj.weight.T)
        x_LH = layer.norm2(x_LH + layer.ffn.fc_out(layer.ffn.fc_in(x_LH).relu()))
    return x_LH, read


def defined_loss(head, table, hidden_LH, labels_L):
    """Grave et al. 2017: a softmax over frequent tokens and clusters, and another one in each cluster."""
    boundaries = [0, 11, 30, 61]
    first = torch.cat([hidden_LH @ table[:11].T + head.bias[:11], head.clusters(hidden_LH)], 1).log_softmax(1)
    losses = []
    for row, label in zip(range(len(labels_L)), labels_L.tolist(), strict=True):
        cluster = sum(label >= border for border in boundaries[1:-1])
        if not cluster:
            losses.append(-first[row, label])
            continue
        start, end = boundaries[cluster], boundaries[cluster + 1]
        inside = (hidden_LH[row] @ table[start:end].T + head.bias[start:end]).log_softmax(0)
        losses.append(-first[row, 10 + cluster] - inside[label - start])
    return torch.stack(losses)


def segments_of(lengths, lanes=3):
    """The (lanes, length) ids of each segment, and their next tokens."""
    ids = torch.randint(0, 61, (lanes, sum(lengths) + 1), generator=torch.Generator().manual_seed(0))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    pairs = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return [(ids[:, start:end], ids[:, start + 1 : end + 1]) for start, end in pairs]


def packed(ids_NL):
    return Packed(ids_NL.flatten(), (ids_NL.shape[1],) * len(ids_NL))


@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients_with_memory_match_the_definition(training):
    backbone, head = model_of(num_layers=2)
    backbone.train(training)
    state, read, count = backbone.initial_state(2), 0, 7 if training else 16
    assert state["memory"].shape == (2, 2, count, 20)
    memories = [[torch.zeros(0, 20).double()] * 2 for _ in range(2)]
    table = backbone.embed.token.weight
    for ids, labels in segments_of((5, 5, 3), 2):
        carried = Carried({"memory": state["memory"].double()}, (read,) * 2)
        hidden = backbone(packed(ids), carried=carried)
        wanted = []
        for lane in range(2):
            own, inputs = defined(
                backbone, ids[lane], memories[lane], None if training else 16, None if training else 9
            )
            memories[lane] = [torch.cat(pair).detach()[-count:] for pair in zip(memories[lane], inputs, strict=True)]
            wanted.append(own)
        torch.testing.assert_close(hidden, torch.cat(wanted), rtol=1e-9, atol=1e-9)
        loss = head.loss_sum(hidden, table, labels.flatten())
        expected = defined_loss(head, table, torch.cat(wanted), labels.flatten()).sum()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        parameters = {**dict(backbone.named_parameters()), **dict(head.named_parameters())}
        ours, theirs = (torch.autograd.grad(total, list(parameters.values())) for total in (loss, expected))
        for name, mine, reference in zip(parameters, ours, theirs, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-9, msg=name)
        state, read = {"memory": carried.after["memory"].detach()}, read + ids.shape[1]
    kept = min(read, count)
    for lane in range(2):
        torch.testing.assert_close(state["memory"][lane, :, -kept:], torch.stack(memories[lane]))


@torch.no_grad()
def test_segments_with_long_memory_match_one_pass():
    """A layer attends to the length of the memory; here the memory is longer than the text."""
    backbone, _ = model_of(evaluation_memory_length=40, clamp_distance=None, same_length=False)
    backbone.eval()
    parts = [ids for ids, _ in segments_of((5, 8, 4, 6))]
    whole = backbone(packed(torch.cat(parts, 1))).view(3, -1, 20)
    state, at = backbone.initial_state(3), 0
    state["memory"] = state["memory"].double()
    for ids in parts:
        carried = Carried(state, (at,) * 3)
        hidden = backbone(packed(ids), carried=carried).view(3, -1, 20)
        torch.testing.assert_close(hidden, whole[:, at : at + ids.shape[1]], rtol=1e-9, atol=1e-9)
        state, at = carried.after, at + ids.shape[1]


def test_memory_reaches_one_segment_per_layer_without_gradient():
    backbone, _ = model_of(memory_length=4)
    ids = torch.randint(0, 61, (6, 4))
    vectors = [torch.zeros(4, 20, dtype=torch.float64, requires_grad=True) for _ in ids]
    states, state = [], backbone.initial_state(1)
    for number, (row, vector) in enumerate(zip(ids, vectors, strict=True)):
        handle = backbone.embed.token.register_forward_hook(lambda *a, vector=vector: a[-1] + vector)
        carried = Carried({"memory": state["memory"].double()}, (4 * number,))
        states.append(backbone(packed(row[None]), carried=carried))
        handle.remove()
        state = carried.after
        assert not state["memory"].requires_grad
    assert torch.autograd.grad(states[4].sum(), vectors, allow_unused=True)[3] is None
    last = states[5].detach()
    for back in range(6):
        state = backbone.initial_state(1)
        for number, row in enumerate(ids):
            changed = row.clone()
            if number == 5 - back:
                changed[0 if back else 1] = (row[0 if back else 1] + 1) % 61
            carried = Carried({"memory": state["memory"].double()}, (4 * number,))
            hidden, state = backbone(packed(changed[None]), carried=carried).detach(), carried.after
        reached = not torch.allclose(hidden, last, rtol=0, atol=1e-12)
        assert reached == (back <= 3), back


def test_recomputed_layers_match_with_memory():
    (first, _), (second, labels) = segments_of((5, 5))
    runs = []
    for recomputes in (False, True):
        backbone, head = model_of()
        backbone.recomputes = recomputes
        carried = Carried({"memory": backbone.initial_state(3)["memory"].double()}, (0,) * 3)
        backbone(packed(first), carried=carried)
        after = Carried({"memory": carried.after["memory"].detach()}, (5,) * 3)
        hidden = backbone(packed(second), carried=after)
        head.loss_sum(hidden, backbone.embed.token.weight, labels.flatten()).backward()
        runs.append([after.after["memory"], *(parameter.grad for parameter in backbone.parameters())])
    for plain, recomputed in zip(*runs, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_cached_and_packed_states_match_separate_texts():
    backbone, head = model_of()
    backbone.eval()
    ids = [torch.randint(0, 61, (length,)) for length in (6, 9, 3)]
    alone = [backbone(packed(row[None])) for row in ids]
    together = backbone(Packed(torch.cat(ids), tuple(map(len, ids))))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-9)
    cache = backbone.new_cache(3, 20)
    backbone(Packed(torch.cat([row[:-2] for row in ids]), tuple(len(row) - 2 for row in ids)), cache=cache)
    for back in (-2, -1):
        steps = backbone(Packed(torch.stack([row[back] for row in ids]), (1, 1, 1)), cache=cache)
        torch.testing.assert_close(steps, torch.stack([states[back] for states in alone]), rtol=1e-9, atol=1e-9)
    logs = head(together, backbone.embed.token.weight)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(18).double())
    labels = torch.arange(18) * 3
    each, best = head.scores(together, backbone.embed.token.weight, labels)
    expected = defined_loss(head, backbone.embed.token.weight, together, labels)
    torch.testing.assert_close(each, expected.float())
    assert torch.equal(best, logs.argmax(-1))
    smoothed = head.loss_sum(together, backbone.embed.token.weight, labels, 0.1)
    torch.testing.assert_close(smoothed, F.cross_entropy(logs, labels, reduction="sum", label_smoothing=0.1))


def test_base_has_published_parameter_count():
    with torch.device("meta"):
        backbone = build(TransformerXlConfig(), 0)
        parts = backbone, lm_head(backbone)
    assert sum(parameter.numel() for part in parts for parameter in part.parameters()) == 151_107_538


def test_cutoffs_beyond_the_vocabulary_are_ignored():
    assert isinstance(model_of()[1], AdaptiveLMHead) and model_of()[1].sizes == [11, 19, 31]
    assert not isinstance(model_of(cutoffs=())[1], AdaptiveLMHead)
    with pytest.raises(ValueError, match="not in increasing order"):
        TransformerXlConfig(cutoffs=(30, 11))
