"""Twenty training steps of a transformers model and ours with torch's AdamW: equal weights to 1e-5."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmtool.types import Packed
from tests.models.parity import CASES, Pair, loaded

STEPS = 20


def batches(steps: int, documents: int = 8):
    """Texts of 2 to 40 tokens with labels at a sixth of the positions. Token 0 is padding, which is never trained."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        lengths = tuple(torch.randint(2, 41, (documents,), generator=generator).tolist())
        tokens = torch.randint(1, 97, (sum(lengths),), generator=generator)
        at = torch.rand(sum(lengths), generator=generator).argsort()[: sum(lengths) // 6].sort().values
        labels = torch.randint(97, (len(at),), generator=generator)
        yield Packed(tokens, lengths), at, labels


def padded(packed: Packed, values_T: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    mask = torch.arange(max(packed.lengths)) < torch.tensor(packed.lengths)[:, None]
    rows = torch.full(mask.shape, fill)
    rows[mask] = values_T
    return rows, mask


def our_loss(pair: Pair, name: str, packed: Packed, at: Tensor, labels: Tensor, count: int) -> Tensor:
    backbone = pair.ours.backbone
    head = pair.ours.heads["masked_lm" if name == "bert" else "lm"]
    return head.loss_sum(backbone(packed)[at], backbone.embed.token.weight, labels) / count


def their_loss(pair: Pair, name: str, packed: Packed, at: Tensor, labels: Tensor) -> Tensor:
    """The loss over padded rows, with labels -100 where nothing is predicted; transformers computes it for GPT-2."""
    ids, mask = padded(packed, packed.tokens, 0)
    if name == "gpt":
        return pair.theirs(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss
    targets = torch.full_like(packed.tokens, -100)
    targets[at] = labels
    logits = pair.theirs(ids, attention_mask=mask.long()).prediction_logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), padded(packed, targets, -100)[0].flatten())


def next_tokens(packed: Packed) -> tuple[Tensor, Tensor]:
    at = (packed.positions + 1 < torch.tensor(packed.lengths)[packed.documents]).nonzero().flatten()
    return at, packed.tokens[at + 1]


def optimizers_of(pair: Pair, name: str):
    """The optimizers of both models, without BERT's pooler and sentence head, which masked LM does not train."""
    out = ("heads.pooler", "heads.next_sentence", "bert.pooler", "cls.seq_relationship")
    kept = [
        [(key, parameter) for key, parameter in model.named_parameters() if not key.startswith(out)]
        for model in (pair.ours, pair.theirs)
    ]
    # BERT's epsilon. The gradient of a key bias is zero in theory, because a softmax does not depend on it; with 1e-8
    # Adam would turn rounding errors into full steps.
    return [
        torch.optim.AdamW([parameter for _, parameter in some], lr=1e-4, eps=1e-6, weight_decay=0.01) for some in kept
    ]


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_twenty_training_steps_match_transformers(name):
    pair = loaded(CASES[name].pair())
    before = {key: tensor.clone() for key, tensor in pair.ours.state_dict().items()}
    ours, theirs = optimizers_of(pair, name)
    for packed, at, labels in batches(STEPS):
        if name == "gpt":
            at, labels = next_tokens(packed)
        losses = our_loss(pair, name, packed, at, labels, len(at)), their_loss(pair, name, packed, at, labels)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for optimizer, loss in zip((ours, theirs), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    wanted = pair.from_hf(pair.theirs.state_dict())
    for key, tensor in pair.ours.state_dict().items():
        torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=1e-5, msg=lambda text, key=key: key + text)
        if not key.startswith(("heads.pooler", "heads.next_sentence")) and not key.endswith("k_proj.bias"):
            assert (tensor - before[key]).abs().max() > 1e-3, key


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_gradients_of_eight_micro_batches_add_up(name):
    pair = loaded(CASES[name].pair())
    packed, at, labels = next(batches(1))
    if name == "gpt":
        at, labels = next_tokens(packed)
    our_loss(pair, name, packed, at, labels, len(at)).backward()
    whole = {
        key: parameter.grad.clone() for key, parameter in pair.ours.named_parameters() if parameter.grad is not None
    }
    pair.ours.zero_grad()
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        inside = (at >= start) & (at < start + length)
        alone = Packed(packed.tokens[start : start + length], (length,))
        our_loss(pair, name, alone, at[inside] - start, labels[inside], len(at)).backward()
    for key, parameter in pair.ours.named_parameters():
        if key in whole:
            torch.testing.assert_close(parameter.grad, whole[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_packed_matches_separate_texts_in_float64(name):
    """In double precision a packed batch and its separate texts differ by less than 1e-12."""
    pair = loaded(CASES[name].pair())
    backbone = pair.ours.backbone.double()
    packed, _, _ = next(batches(1))
    together = backbone(packed)
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        alone = backbone(Packed(packed.tokens[start : start + length], (length,)))
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-12)
