"""Masked next-token prediction and its hybrid with causal language modeling: losses and gradients compared with those
of a plain loop, both attention masks, filled masks, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from objective_fixtures import backbone, gradients, rows_of, split, store, tokenizer
from torch.nn.functional import cross_entropy

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.base import Inference
from lmtool.learners.rules import require_tokens_of_objective
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.decoder_configs import LlamaConfig
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.objectives.configs import MntpConfig
from lmtool.tokenizers.configs import ByteBpeConfig, SentencePieceConfig
from lmtool.training.precision import FP32_CPU

WORDS = tokenizer("roberta")
STORE = store(WORDS)
MASK, END = WORDS.role("mask"), WORDS.role("eos")


def learner(causal=0.5, **fields):
    return build(MntpConfig(causal=causal, **fields), backbone("gpt", dropout=0.0), WORDS, 3)


def batch_of(built, count=12, documents="joined"):
    return rows_of(built.examples(split(STORE, documents), 24), count)


def plain_terms(built, batch, originals):
    """The mean losses of both terms by a loop over texts. A masked text is compared with the original token by token;
    attention in both directions is an additive mask of zeros, written out for each layer."""
    causal, masked = [], []
    predicted = set((batch.targets["mntp"].at + 1).tolist())
    for start, length, prefix, text in zip(
        batch.inputs.starts, batch.inputs.lengths, batch.inputs.prefixes, originals, strict=True
    ):
        ids = batch.inputs.tokens[start : start + length]
        logits = plain_gpt(built, ids, bidirectional=prefix > 0)
        for position in range(1, length):
            loss = cross_entropy(logits[position - 1], torch.tensor(int(text[position])))
            if prefix == 0:
                causal.append(loss)
            elif start + position in predicted:
                masked.append(loss)
    return causal, masked


def plain_gpt(built, ids, bidirectional):
    """The logits (L, V) of GPT-2's equations over the learner's weights."""
    model, length = built.backbone, len(ids)
    heads = model.config.num_heads
    hidden = model.embed.token.weight[ids] + model.embed.position.weight[:length]
    barrier = torch.zeros(length, length)
    if not bidirectional:
        barrier = barrier.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    for layer in model.layers:
        attention, inner = layer.self_attn, layer.norm1(hidden)
        query, key, value = (
            project(inner).view(length, heads, -1).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 + barrier).softmax(-1)
        hidden = hidden + attention.out_proj((weights @ value).transpose(0, 1).reshape(length, -1))
        inner = torch.nn.functional.gelu(layer.ffn.fc_in(layer.norm2(hidden)), approximate="tanh")
        hidden = hidden + layer.ffn.fc_out(inner)
    return model.final_norm(hidden) @ model.embed.token.weight.T


def originals_of(built, batch, documents="joined"):
    examples = built.examples(split(STORE, documents), 24)
    rows = examples.plan(0).rows[: len(batch.inputs.lengths)]
    return [examples.stream.read(np.array([row["start"]]), np.array([row["length"]])) for row in rows]


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("causal", [0.0, 0.4])
def test_losses_and_gradients_equal_a_plain_loop(causal, documents):
    built = learner(causal).train()
    batch = batch_of(built, documents=documents)
    losses, grads = gradients(built, [batch])
    built.zero_grad()
    terms = plain_terms(built, batch, originals_of(built, batch, documents))
    means = {name: torch.stack(values).mean() for name, values in zip(("clm", "mntp"), terms, strict=True) if values}
    assert set(means) == set(losses) == ({"clm", "mntp"} if causal else {"mntp"})
    assert losses == pytest.approx({name: value.item() for name, value in means.items()}, rel=1e-5)
    (causal * means["clm"] + (1 - causal) * means["mntp"] if causal else means["mntp"]).backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)


def test_z_loss_and_its_gradient_equal_a_plain_loop_and_scores_leave_it_out():
    weight, causal = 0.05, 0.4
    built = learner(causal, z_loss=weight).train()
    batch = batch_of(built)
    losses, grads = gradients(built, [batch])
    built.zero_grad()
    squares, entropies = {"clm": [], "mntp": []}, {"clm": [], "mntp": []}
    predicted = set((batch.targets["mntp"].at + 1).tolist())
    texts = zip(
        batch.inputs.starts, batch.inputs.lengths, batch.inputs.prefixes, originals_of(built, batch), strict=True
    )
    for start, length, prefix, text in texts:
        logits = plain_gpt(built, batch.inputs.tokens[start : start + length], bidirectional=prefix > 0)
        for position in range(1, length):
            if prefix == 0 or start + position in predicted:
                term = "mntp" if prefix else "clm"
                squares[term].append(logits[position - 1].exp().sum().log() ** 2)
                entropies[term].append(cross_entropy(logits[position - 1], torch.tensor(int(text[position]))))
    means = {
        term: torch.stack(entropies[term]).mean() + weight * torch.stack(squares[term]).mean() for term in entropies
    }
    assert losses == pytest.approx({name: value.item() for name, value in means.items()}, rel=1e-5)
    (causal * means["clm"] + (1 - causal) * means["mntp"]).backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)
    for term, scores in built.eval().score(batch).items():
        assert scores.losses.mean().item() == pytest.approx(torch.stack(entropies[term]).mean().item(), rel=1e-5)


def test_masked_texts_are_masked_and_read_in_both_directions_and_causal_texts_are_not():
    built = learner()
    batch = batch_of(built, 60)
    texts = batch.inputs.tokens.split(batch.inputs.lengths)
    for text, original, length, prefix in zip(
        texts, originals_of(built, batch), batch.inputs.lengths, batch.inputs.prefixes, strict=True
    ):
        assert prefix in (0, length) and text[0] == original[0]
        changed = (text.numpy() != original).sum()
        assert changed == 0 if prefix == 0 else (text == MASK).any() and changed <= round(0.15 * length)
    causal = np.array(batch.inputs.prefixes) == 0
    assert 15 <= causal.sum() <= 45
    assert len(batch.targets["clm"].labels) == (np.array(batch.inputs.lengths)[causal] - 1).sum()
    other = built.examples(split(STORE), 24).batch(built.examples(split(STORE), 24).plan(0).rows[:60], np.arange(60), 1)
    assert other.inputs.prefixes != batch.inputs.prefixes


@pytest.mark.parametrize("longest_span", [1, 3])
def test_batches_do_not_change_examples(longest_span):
    built = learner(longest_span=longest_span).train()
    examples = built.examples(split(STORE), 24)
    whole, whole_gradients = gradients(built, [rows_of(examples, 8)])
    rows = examples.plan(0).rows
    parts, part_gradients = gradients(
        built, [examples.batch(rows[[number]], np.array([number]), 0) for number in range(8)]
    )
    assert parts == pytest.approx(whole, rel=1e-5)
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_scores_equal_the_loss_and_baselines_are_unigrams():
    built = learner().eval()
    batch = batch_of(built)
    output, scores = built(batch, 0), built.score(batch)
    for name, term in scores.items():
        assert term.losses.sum().item() == pytest.approx(output.sums[name].item(), rel=1e-5)
        assert len(term.losses) == built.counts(batch)[name]
    baselines = built.predictors(split(STORE), built.examples(split(STORE), 24))
    assert set(baselines) == {"clm", "mntp"}
    chances = {name: np.exp(-baseline.losses_C) for name, baseline in baselines.items()}
    assert chances["clm"][END] > 0 and chances["mntp"][END] == 0


def test_masks_are_filled_from_the_position_before_them():
    """The first token of a text is predicted after an end-of-text token; all others from the token before them."""
    built = learner().eval()
    ids = WORDS.encode("the old cat sat").tolist()
    texts = [[MASK, *ids[1:]], [*ids[:2], MASK, *ids[3:]]]
    packed = type(batch_of(built).inputs)(torch.tensor(sum(texts, [])), tuple(map(len, texts)))
    logits = built.logits_at(packed, torch.tensor([0, len(ids) + 2]))
    wanted = [plain_gpt(built, torch.tensor([END, *text]), True) for text in texts]
    torch.testing.assert_close(logits, torch.stack([wanted[0][0], wanted[1][2]]), rtol=1e-4, atol=1e-5)
    rows = Rows([0], {"text": ["<mask> old cat<mask> near"]}, None, [("text", 1)])
    (record,) = built.responder().answers(rows, Inference(4, 64, FP32_CPU)).records
    assert len(record["masks"]) == 2
    samples = built.samples(batch_of(built, 30), 30)
    assert samples and all(place["position"] > 0 for sample in samples for place in sample["masked"])
    assert all(
        sample["pieces"][place["position"]] == place["truth"] for sample in samples for place in sample["masked"]
    )


def test_only_the_hybrid_continues_texts():
    assert learner(0.5).writer()
    with pytest.raises(UserError, match="fills masks, and cannot continue a text"):
        learner(0.0).writer()


def test_spans_and_whole_words_exclude_each_other():
    with pytest.raises(ValueError, match="whole_word=true masks words, and longest_span=3 spans"):
        MntpConfig(whole_word=True, longest_span=3)


@pytest.mark.parametrize("model", [BertConfig(), LstmConfig()])
def test_models_without_both_masks_are_refused(model):
    assert MntpConfig().first_conflict(model) is not None


def test_vocabulary_without_a_mask_is_refused_with_the_one_that_has_it():
    (problem,) = require_tokens_of_objective(MntpConfig(), GptConfig(), ByteBpeConfig())
    assert "has no mask token" in problem.message and problem.hint == "set tokenizer.special_tokens=roberta"
    assert not list(require_tokens_of_objective(MntpConfig(), GptConfig(), ByteBpeConfig(special_tokens="roberta")))
    (problem,) = require_tokens_of_objective(MntpConfig(), LlamaConfig(), SentencePieceConfig())
    assert problem.hint == "set tokenizer.special_tokens=albert"
