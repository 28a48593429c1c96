"""The recurrent encoder-decoder with attention against its equations, text by text and token by token, in float64 at
odd sizes. The reference of both cells is a GRU as published, or torch.nn.GRUCell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmtool.config.registry import build
from lmtool.models.heads.lm import lm_head
from lmtool.models.pretransformer_configs import RnnAttentionConfig
from lmtool.types import Packed

INPUTS, OUTPUTS = (5, 1, 12, 3, 7), (4, 6, 0, 9, 7)
M, C, A, OUT, V = 7, 11, 9, 5, 61
SIZES = {"vocab_size": V, "embedding_size": M, "hidden_size": C, "attention_size": A, "output_size": OUT}


class PublishedCell(nn.GRUCell):
    """Appendix A.1.1: the state is multiplied by the reset gate r before U. `kept` is 1 - z."""

    def forward(self, x, state):
        (of_r, of_kept, of_new), (u_r, u_kept, u_new) = self.weight_ih.split(C), self.weight_hh.split(C)
        (b_r, b_kept, b_new), (c_r, c_kept, c_new) = self.bias_ih.split(C), self.bias_hh.split(C)
        r = torch.sigmoid(of_r @ x + b_r + u_r @ state + c_r)
        kept = torch.sigmoid(of_kept @ x + b_kept + u_kept @ state + c_kept)
        new = torch.tanh(of_new @ x + b_new + u_new @ (r * state) + c_new)
        return kept * state + (1 - kept) * new


class Plain(nn.Module):
    """The equations of Bahdanau et al. 2015, section 3 and appendix A."""

    def __init__(self, cell):
        super().__init__()
        self.embed, self.table = nn.Embedding(V, M), nn.Linear(OUT, V, bias=False)
        self.forward_cell, self.backward_cell = cell(M, C), cell(M, C)
        self.cell, self.first = cell(M + 2 * C, C), nn.Linear(C, C)
        self.of_state, self.of_input = nn.Linear(C, A, bias=False), nn.Linear(2 * C, A)
        self.score, self.output = nn.Linear(A, 1, bias=False), nn.Linear(C + M + 2 * C, 2 * OUT)

    def encode(self, tokens):
        vectors, sides = self.embed(tokens), []
        for cell, order in ((self.forward_cell, 1), (self.backward_cell, -1)):
            state, states = vectors.new_zeros(C), []
            for vector in list(vectors)[::order]:
                state = cell(vector, state)
                states.append(state)
            sides.append(torch.stack(states[::order]))
        return torch.cat(sides, 1)

    def hidden(self, inputs, outputs):
        annotations = self.encode(inputs)
        state, rows = torch.tanh(self.first(annotations[0, C:])), []
        for vector in self.embed(outputs):
            energies = torch.stack(
                [self.score(torch.tanh(self.of_state(state) + self.of_input(h)))[0] for h in annotations]
            )
            context = sum(weight * h for weight, h in zip(energies.softmax(0), annotations, strict=True))
            state = self.cell(torch.cat([vector, context]), state)
            maps = self.output(torch.cat([state, vector, context]))
            rows.append(torch.maximum(maps[::2], maps[1::2]))
        return torch.stack(rows) if rows else torch.zeros(0, OUT).double()


def copied(plain, ours, head):
    """Copies the plain weights into our model; returns pairs of our tensor and the plain one."""
    encoder, decoder = ours.encoder.layers[0].cell, ours.decoder.layers[0]
    attention = decoder.cross_attn
    pairs = [
        (ours.embed.token.weight, plain.embed.weight),
        (head.output.weight, plain.table.weight),
        (decoder.state_gates.weight, plain.cell.weight_hh),
        (decoder.state_gates.bias, plain.cell.bias_hh),
        (decoder.token_gates.bias, plain.cell.bias_ih),
        (attention.q_proj.weight, plain.of_state.weight),
        (attention.score.weight, plain.score.weight),
    ]
    for module, other in (
        (decoder.first_state, plain.first), (attention.k_proj, plain.of_input), (decoder.output, plain.output)
    ):  # fmt: skip
        pairs += [(module.weight, other.weight), (module.bias, other.bias)]
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        pairs.append((getattr(encoder, f"{name}_l0"), getattr(plain.forward_cell, name)))
        pairs.append((getattr(encoder, f"{name}_l0_reverse"), getattr(plain.backward_cell, name)))
    with torch.no_grad():
        for own, other in pairs:
            own.copy_(other)
        of_token, of_context = plain.cell.weight_ih.split([M, 2 * C], 1)
        decoder.token_gates.weight.copy_(of_token)
        decoder.context_gates.weight.copy_(of_context)
    return pairs


@pytest.fixture(params=["before", "after"])
def pair(request):
    torch.manual_seed(0)
    plain = Plain(PublishedCell if request.param == "before" else nn.GRUCell).double()
    ours = build(RnnAttentionConfig(**SIZES, max_positions=40, reset=request.param), 0).double()
    head = lm_head(ours).double()
    return plain, ours, head, copied(plain, ours, head)


def texts(lengths, seed):
    tokens = torch.randint(0, V, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Packed(tokens, lengths)


def test_loss_and_gradients_match_the_equations(pair):
    plain, ours, head, pairs = pair
    inputs, outputs, labels = texts(INPUTS, 1), texts(OUTPUTS, 2), texts(OUTPUTS, 3).tokens
    sides = zip(inputs.tokens.split(INPUTS), outputs.tokens.split(OUTPUTS), strict=True)
    expected = torch.cat([plain.hidden(*texts) for texts in sides])
    hidden = ours(inputs, None, outputs)
    torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-12)
    wanted = F.cross_entropy(plain.table(expected), labels, reduction="sum")
    loss = head.loss_sum(hidden, ours.embed.token.weight, labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    wanted.backward()
    loss.backward()
    for own, other in pairs:
        assert other.grad.abs().max() > 1e-4
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-10)
    decoder = ours.decoder.layers[0]
    gates = torch.cat([decoder.token_gates.weight.grad, decoder.context_gates.weight.grad], 1)
    torch.testing.assert_close(gates, plain.cell.weight_ih.grad, rtol=1e-5, atol=1e-10)


@torch.no_grad()
def test_cached_steps_with_beams_match_the_whole_text(pair):
    """Two texts per input, of which one input remains; steps cache the states, and the input keys are computed once."""
    _, ours, _, _ = pair
    inputs, texts_of = texts((5, 1, 12), 1), [texts((6,), seed).tokens for seed in (4, 5, 6)]
    doubled = Packed(inputs.tokens[:5], (5,))
    whole = [ours(doubled, None, Packed(text, (6,))) for text in texts_of[:2]]
    encoded = ours.encode(inputs).in_rows()
    cache = ours.new_cache(3, 40)
    first = ours.decode(encoded, Packed(torch.stack([text[0] for text in texts_of]), (1, 1, 1)), cache=cache)
    torch.testing.assert_close(first[:1], whole[0][:1], rtol=0, atol=1e-12)
    assert encoded.cached[ours.decoder.layers[0].cross_attn][0].shape == (36, A)
    # Only the first input continues, with two texts that have the same first token.
    cache.select([0, 0])
    encoded.select([0], 2)
    ends = [texts_of[0], torch.cat([texts_of[0][:1], texts_of[1][1:]])]
    steps = [
        ours.decode(encoded, Packed(torch.stack([text[at] for text in ends]), (1, 1)), cache=cache)
        for at in range(1, 6)
    ]
    for row, text in enumerate(ends):
        alone = ours(doubled, None, Packed(text, (6,)))
        torch.testing.assert_close(torch.cat([step[row][None] for step in steps]), alone[1:], rtol=0, atol=1e-12)


@torch.no_grad()
def test_empty_input_has_finite_states(pair):
    _, ours, _, _ = pair
    inputs, outputs = texts((3, 0), 1), texts((2, 4), 2)
    hidden = ours(inputs, None, outputs)
    assert torch.isfinite(hidden).all()
    torch.testing.assert_close(hidden[:2], ours(texts((3,), 1), None, Packed(outputs.tokens[:2], (2,))))


def test_initial_weights_match_the_publication():
    decoder = build(RnnAttentionConfig(vocab_size=V, embedding_size=50, hidden_size=64, attention_size=70), 0)
    layer, cell = decoder.decoder.layers[0], decoder.encoder.layers[0].cell
    for weight in (layer.state_gates.weight, cell.weight_hh_l0, cell.weight_hh_l0_reverse):
        for gate in weight.detach().split(64):
            torch.testing.assert_close(gate @ gate.T, torch.eye(64), rtol=0, atol=1e-5)
    assert not layer.cross_attn.score.weight.any() and not cell.bias_ih_l0.any()
    assert abs(layer.cross_attn.q_proj.weight.std().item() / 0.001 - 1) < 0.1
    assert abs(cell.weight_ih_l0.std().item() / 0.01 - 1) < 0.1
