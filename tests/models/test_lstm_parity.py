"""The LSTM language model against torch.nn.LSTM and linear layers, in float64 at odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmtool.config.registry import build
from lmtool.models.heads.lm import lm_head
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.nn.cache import Carried
from lmtool.objectives.configs import ClmConfig, PrefixLmConfig
from lmtool.tasks.configs.texts import Seq2SeqConfig
from lmtool.types import Packed

LENGTHS = (5, 1, 0, 12, 7)
CONFIG = LstmConfig(vocab_size=97, num_layers=2, embedding_size=13, hidden_size=19, max_positions=40)


class Plain(nn.Module):
    """The reference: one text per call."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(97, 13), nn.LSTM(13, 19, num_layers=2, batch_first=True)
        self.output = nn.Linear(19, 97, bias=False)

    def forward(self, tokens_T):
        return self.output(self.lstm(self.embed(tokens_T[None]))[0][0])


@pytest.fixture
def pair():
    torch.manual_seed(0)
    plain, ours = Plain().double(), build(CONFIG, 0)
    head = lm_head(ours)
    ours.double(), head.double()
    with torch.no_grad():
        ours.embed.token.weight.copy_(plain.embed.weight)
        head.output.weight.copy_(plain.output.weight)
        for number, layer in enumerate(ours.layers):
            layer.cell.weight_ih.copy_(getattr(plain.lstm, f"weight_ih_l{number}"))
            layer.cell.weight_hh.copy_(getattr(plain.lstm, f"weight_hh_l{number}"))
            # torch has two biases, which are added.
            layer.cell.bias.copy_(getattr(plain.lstm, f"bias_ih_l{number}") + getattr(plain.lstm, f"bias_hh_l{number}"))
    return plain, ours, head


def texts():
    tokens = torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return Packed(tokens, LENGTHS)


def test_loss_and_gradients_match_torch_lstm(pair):
    plain, ours, head = pair
    packed = texts()
    documents = [tokens for tokens in packed.tokens.split(LENGTHS) if len(tokens) > 1]
    wanted = sum(F.cross_entropy(plain(text)[:-1], text[1:], reduction="sum") for text in documents)
    at = torch.arange(sum(LENGTHS))[packed.positions + 1 < torch.tensor(LENGTHS)[packed.documents]]
    loss = head.loss_sum(ours(packed, read_M=at), ours.embed.token.weight, packed.tokens[at + 1])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    wanted.backward()
    loss.backward()
    gradients = [ours.embed.token.weight.grad, head.output.weight.grad]
    expected = [plain.embed.weight.grad, plain.output.weight.grad]
    for number, layer in enumerate(ours.layers):
        gradients += [layer.cell.weight_ih.grad, layer.cell.weight_hh.grad, layer.cell.bias.grad]
        expected += [getattr(plain.lstm, f"{name}_l{number}").grad for name in ("weight_ih", "weight_hh", "bias_ih")]
    for own, other in zip(gradients, expected, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-10)


@torch.no_grad()
def test_cached_steps_match_the_whole_text(pair):
    """The cache of a text is its states, whose size does not depend on its length."""
    plain, ours, _ = pair
    text = texts().tokens[6:18]
    whole, other = ours(Packed(text, (12,))), ours(Packed(text[:4], (4,)))
    torch.testing.assert_close(whole, plain.lstm(plain.embed(text[None]))[0][0], rtol=1e-10, atol=1e-12)
    cache = ours.new_cache(2, 40)
    first = ours(Packed(torch.cat([text[:3], text[:2]]), (3, 2)), cache=cache)
    kept = [part.numel() for layer in cache.layers for part in layer.state]
    second = ours(Packed(torch.cat([text[3:6], text[2:4]]), (3, 2)), cache=cache)
    cache.select([0])
    steps = [ours(Packed(token[None], (1,)), cache=cache) for token in text[6:]]
    torch.testing.assert_close(torch.cat([first[:3], second[:3], *steps]), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([first[3:], second[3:]]), other, rtol=0, atol=1e-12)
    assert kept == [2 * 19] * 4 and [part.numel() for layer in cache.layers for part in layer.state] == [19] * 4


@torch.no_grad()
def test_segments_with_carried_state_match_the_whole_text(pair):
    _, ours, _ = pair
    one, other = texts().tokens[6:18], texts().tokens[13:25]
    whole = [ours(Packed(text, (12,))) for text in (one, other)]
    state, parts = ours.initial_state(2), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        carried = Carried(state, (start, start))
        parts.append(ours(Packed(torch.cat([one[start:end], other[start:end]]), (end - start,) * 2), carried=carried))
        state = carried.after
        assert state.keys() == carried.before.keys()
    for number, text in enumerate(whole):
        joined = torch.cat([part.chunk(2)[number] for part in parts])
        torch.testing.assert_close(joined, text, rtol=0, atol=1e-12)


def test_initial_forget_bias_is_one():
    cell = build(CONFIG, 0).layers[1].cell
    assert cell.bias.tolist() == [0.0] * 19 + [1.0] * 19 + [0.0] * 38
    assert abs(cell.weight_hh.std().item() * 19**0.5 - 1) < 0.1


def test_prefix_attention_of_a_recurrent_model_is_refused():
    assert "model=lstm reads tokens in turn" in PrefixLmConfig().first_conflict(CONFIG).message
    assert ClmConfig().first_conflict(CONFIG) is None
    problem = Seq2SeqConfig(mask="prefix").first_conflict(CONFIG)
    assert problem.key == "task.mask" and problem.hint == "set task.mask=causal"
