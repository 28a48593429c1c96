"""Bidirectional language modeling: targets, loss, and the sampled softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from lmtool.config.registry import build
from lmtool.costs.activations import saved_activations
from lmtool.costs.attention import VALUE_BYTES, Formats
from lmtool.models.heads.sampled import SampledLMHead, log_uniform
from lmtool.models.pretransformer_configs import ElmoConfig
from lmtool.objectives.bilm import BidirectionalLanguageModel
from lmtool.objectives.configs import BilmConfig
from lmtool.objectives.examples.windows import Stream
from lmtool.objectives.examples.words import BACKWARD, FORWARD, WordWindows, word_windows
from lmtool.tokenizers.configs import SpelledConfig
from tests.costs.test_work import saved_bytes
from tests.objectives.objective_fixtures import split, store

TEXTS = ["the cat sat on the mat .", "zyzzyvas", "a dog and the cats ran , and ran on and on to a mat by the dog ."]


@pytest.fixture(scope="module")
def tokenizer():
    return build(SpelledConfig(), [text.replace("cats", "cat") for text in TEXTS[::2]] * 2, 400)


def learner_of(tokenizer, negatives=None) -> BidirectionalLanguageModel:
    config = ElmoConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, cell_size=6, word_length=12, character_size=4,
        filters=((1, 4), (2, 4)), highways=1, dropout=0.0,
    )  # fmt: skip
    backbone = build(config, 0)
    backbone.spell(tokenizer)
    return BidirectionalLanguageModel(BilmConfig(negatives=negatives), backbone, tokenizer, 0).double()


def words_of(tokenizer, ids) -> list[str]:
    """The words of ids, with the pieces of spelled words joined."""
    return tokenizer.decode(ids, skip_special=False).split()


@pytest.mark.parametrize("documents", ["separate", "joined"])
@pytest.mark.parametrize("max_length", [12, 64])
def test_every_word_is_predicted_once_per_direction(tokenizer, documents, max_length):
    tokens = store(tokenizer, [[text] for text in TEXTS])
    examples = WordWindows(tokenizer, tokens, max_length, documents, "train")
    rows = examples.plan(0).rows
    predicted = {FORWARD: [], BACKWARD: []}
    for row in rows:
        batch = examples.batch(np.array([row], dtype=rows.dtype), np.arange(1), 0)
        assert batch.inputs.lengths[0] <= max_length and tokenizer.starts_word[int(batch.inputs.tokens[0])]
        for term, target in batch.targets.items():
            predicted[term] += tokenizer.readable(target.labels)
    listed = [[word if word not in ("zyzzyvas", "cats") else "<UNK>" for word in text.split()] for text in TEXTS]
    texts = [[*text, "</S>"] for text in listed]
    texts = texts if documents == "separate" else [[word for text in texts for word in text]]
    assert predicted[FORWARD] == [word for text in texts for word in text[1:]]
    assert predicted[BACKWARD] == [word for text in texts for word in text[:-1]]
    counts = examples.counts(tokenizer.vocab_size)
    flat = [word for text in texts for word in text]
    assert {tokenizer.readable([n])[0]: c for n, c in enumerate(counts) if c} == {w: flat.count(w) for w in set(flat)}


def test_truncated_words_are_counted_in_a_warning(tokenizer):
    learner = learner_of(tokenizer)  # reads at most ten bytes per word
    text = [["the cat and zyzzyvas sat"], ["zyzzyvasses"], ["é" * 40 + " ran"]]
    examples = learner.examples(split(store(tokenizer, text)), 64)
    (warning,) = examples.metadata()["warnings"]
    assert "2 words have more than 10 bytes" in warning
    assert "warnings" not in learner.examples(split(store(tokenizer, text[:1])), 64).metadata()


def test_planned_activations_match_saved_bytes(tokenizer):
    learner = learner_of(tokenizer).float().train()
    examples = learner.examples(split(store(tokenizer, [[text] for text in TEXTS] * 30)), 32)
    batch = examples.batch(examples.plan(0).rows, np.arange(len(examples.plan(0))), 0)
    kept = saved_activations(learner, Formats(), batch.tokens / len(batch.examples)).activations
    # Repeated texts have few distinct words, which the reader processes once.
    kept -= VALUE_BYTES * learner.backbone.reader.saved_activations(1.0, 1.0)[1]
    saved = saved_bytes(learner, lambda: learner.backbone(batch.inputs))
    assert batch.tokens * kept == pytest.approx(saved, rel=0.25)


def test_windows_split_only_words_longer_than_max_length():
    begins_V = np.array([True, False])
    tokens = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0])
    stream = Stream(tokens, np.array([0, 6, 16]), None)
    joined = word_windows(stream, begins_V, 5, joined=True).rows
    assert joined["length"].max() <= 5
    ends = joined["start"] + joined["length"]
    assert ends[-1] == 16 and (joined["start"][1:] <= ends[:-1]).all() and (np.diff(joined["start"]) > 0).all()
    cut = [start for start in joined["start"].tolist() if not begins_V[tokens[start]]]
    assert cut == [11], "only the word of seven tokens is split"


def test_loss_is_the_mean_of_forward_and_backward_cross_entropy(tokenizer):
    learner = learner_of(tokenizer)
    examples = WordWindows(tokenizer, store(tokenizer, [[text] for text in TEXTS]), 64, "separate", "train")
    batch = examples.batch(examples.plan(0).rows, np.arange(3), 0)
    output = learner(batch, 1)
    hidden_TH, head = learner.backbone(batch.inputs), learner.heads["lm"]
    for term, half in ((FORWARD, hidden_TH[:, :4]), (BACKWARD, hidden_TH[:, 4:])):
        target = batch.targets[term]
        logits = linear(half[target.at], head.output.weight, head.bias)
        torch.testing.assert_close(output.sums[term], cross_entropy(logits, target.labels, reduction="sum"))
        torch.testing.assert_close(
            learner.score(batch)[term].losses.sum(), output.sums[term].float(), check_dtype=False
        )
    assert output.loss_weights == {FORWARD: 0.5, BACKWARD: 0.5}


def test_sampled_softmax_is_used_in_training_only(tokenizer):
    learner = learner_of(tokenizer, negatives=5)
    examples = WordWindows(tokenizer, store(tokenizer, [[text] for text in TEXTS]), 64, "separate", "train")
    batch = examples.batch(examples.plan(0).rows, np.arange(3), 0)
    first, again, other = (learner(batch, step).sums[FORWARD] for step in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    learner.eval()
    whole = learner(batch, 1).sums[FORWARD]
    torch.testing.assert_close(whole.float(), learner.score(batch)[FORWARD].losses.sum().float())


def test_sampled_loss_and_gradients_match_a_plain_loop():
    torch.manual_seed(0)
    head = SampledLMHead(4, 30, 7).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    sample, hidden = log_uniform(30, 7, 0, 1), torch.randn(700, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 30, (700,))
    assert torch.isin(labels, sample.ids_K).any()
    losses = []
    for row, label in zip(hidden, labels.tolist(), strict=True):
        words = [label, *(word for word in sample.ids_K.tolist() if word != label)]
        expected = sample.log_expected(torch.tensor(words))
        logits = head.output.weight[words] @ row + head.bias[words] - expected
        losses.append(cross_entropy(logits[None], torch.tensor([0])))
    ours, theirs = head.sampled_loss_sum(hidden, labels, sample), torch.stack(losses).sum()
    torch.testing.assert_close(ours, theirs)
    inputs = [hidden, head.output.weight, head.bias]
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs))


def test_samples_are_log_uniform_without_replacement():
    words, size, draws = 50, 5, 3000
    samples = [log_uniform(words, size, 0, step) for step in range(draws)]
    assert all(len(set(sample.ids_K.tolist())) == size for sample in samples)
    counts = np.bincount(np.concatenate([sample.ids_K.numpy() for sample in samples]), minlength=words)
    # The expectation depends on the number of draws; its mean over samples is the frequency of a word.
    expected = sum(sample.log_expected(torch.arange(words)).exp().numpy() for sample in samples)
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected.max()) and counts[0] > 5 * counts[-1] > 0
    assert torch.equal(log_uniform(words, size, 3, 4).ids_K, log_uniform(words, size, 3, 4).ids_K)
    assert SampledLMHead(4, 30, 30).sampled is None and SampledLMHead(4, 30, None).logits_per_target == 30
