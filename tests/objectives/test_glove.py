"""GloVe: counts, loss and gradients against plain loops, held-out counts, and runs through the commands."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.pretransformer_configs import WordVectorsConfig
from lmtool.objectives import glove
from lmtool.objectives.configs import GloveConfig
from lmtool.objectives.glove import Glove
from lmtool.tokenizers.configs import WordConfig
from tests.commands.conftest import pretrain, working_in
from tests.figures import quick_runs as quick_runs
from tests.objectives.objective_fixtures import TEXT, rows_of, split
from tests.objectives.test_skip_gram import store_of_ids


@pytest.fixture(scope="module")
def words():
    return build(WordConfig(minimum_count=1), [TEXT + " ."], 64)


def learner_of(words, **fields):
    return Glove(GloveConfig(**fields), build(WordVectorsConfig(vocab_size=40, hidden_size=5), 0), words, 3).double()


def random_documents(words, sizes):
    """Documents of random words and, rarely, the unknown word."""
    draws = np.random.default_rng(2)
    ids = np.append(np.arange(5, 21), words.role("unk"))
    return [draws.choice(ids, size).tolist() for size in sizes]


def plain_counts(documents, window, unknown):
    """1 / distance for each word in the window of each word, document by document."""
    counts = defaultdict(float)
    for document in documents:
        kept = [word for word in document if word != unknown]
        for place, word in enumerate(kept):
            for other in range(max(0, place - window), min(len(kept), place + window + 1)):
                if other != place:
                    counts[word, kept[other]] += 1 / abs(other - place)
    return counts


@pytest.mark.parametrize(("window", "chunk", "pending"), [(10, 1 << 20, 1 << 23), (3, 7, 5), (10, 4, 40)])
def test_counts_match_a_plain_loop(words, monkeypatch, window, chunk, pending):
    """Also where documents span several chunks, and counts are summed in several steps."""
    monkeypatch.setattr(glove, "_CHUNK", chunk)
    monkeypatch.setattr(glove, "_PENDING", pending)
    documents = random_documents(words, (30, 1, 45, 2, 8))
    examples = learner_of(words, window=window).examples(split(store_of_ids(documents)), 32)
    rows = examples.plan(5).rows
    expected = plain_counts(documents, window, words.role("unk"))
    assert {(int(word), int(context)) for word, context, _ in rows} == set(expected) and len(rows) == len(expected)
    assert any(word == context for word, context in expected)
    for word, context, count in rows:
        assert count == pytest.approx(expected[word, context], rel=1e-12)


def test_loss_and_gradients_match_plain_numpy(words):
    documents = random_documents(words, (30, 45))
    learner = learner_of(words, cap=2.0, power=0.6)
    head, table = learner.heads["glove"], learner.backbone.embed.token.weight
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter)
    batch = rows_of(learner.examples(split(store_of_ids(documents)), 32), 50)
    counts = plain_counts(documents, 10, words.role("unk"))
    total, difference = table.detach().numpy(), head.output.token.weight.detach().numpy()
    vectors, contexts = (total + difference) / 2, (total - difference) / 2
    biases = [bias.detach().numpy() for bias in (head.word_bias, head.context_bias)]
    gradient_w, gradient_u = np.zeros_like(total), np.zeros_like(total)
    gradient_b, gradient_c = np.zeros(40), np.zeros(40)
    loss = 0.0
    pairs = batch.inputs.tokens.view(-1, 2).tolist()
    for word, context in pairs:
        count = counts[word, context]
        weight = min(1.0, (count / 2.0) ** 0.6)
        error = vectors[word] @ contexts[context] + biases[0][word] + biases[1][context] - np.log(count)
        loss += weight * error**2 / len(pairs)
        slope = 2 * weight * error / len(pairs)
        gradient_w[word] += slope * contexts[context]
        gradient_u[context] += slope * vectors[word]
        gradient_b[word] += slope
        gradient_c[context] += slope
    assert learner.counts(batch) == {"glove": 50.0} and sum(counts[tuple(pair)] > 2 for pair in pairs) > 3
    ours = learner(batch, 1).sums["glove"] / 50
    assert ours.item() == pytest.approx(loss, rel=1e-6)  # labels are float32
    gradients = torch.autograd.grad(ours, [table, head.output.token.weight, head.word_bias, head.context_bias])
    # w = (table + difference) / 2 and u = (table - difference) / 2.
    expected = [(gradient_w + gradient_u) / 2, (gradient_w - gradient_u) / 2, gradient_b, gradient_c]
    for own, plain in zip(gradients, expected, strict=True):
        assert np.abs(plain).max() > 1e-2
        np.testing.assert_allclose(own.numpy(), plain, rtol=1e-5, atol=1e-7)
    scores = learner.score(batch)["glove"]
    assert scores.losses.mean().item() == pytest.approx(loss, rel=1e-5)


def test_held_out_counts_are_scaled_to_the_training_text(words):
    documents = random_documents(words, (30, 45))
    learner = learner_of(words)
    learner.examples(split(store_of_ids(documents * 4)), 32)
    held_out = learner.examples(split(store_of_ids(documents), name="validation"), 32)
    again = learner_of(words)
    unscaled = again.examples(split(store_of_ids(documents), name="validation"), 32)
    again.load_state_dict(learner.state_dict())
    loaded = again.examples(split(store_of_ids(documents), name="validation"), 32)
    assert held_out.scale == loaded.scale == pytest.approx(4) and unscaled.scale == 1
    four, one = (rows_of(examples, 9).targets["glove"].labels for examples in (held_out, unscaled))
    torch.testing.assert_close(four[:, 0], one[:, 0] + np.log(4))
    assert torch.equal(four[:, 1], one[:, 1]), "the weight is that of the held-out text"


def test_baseline_is_the_best_single_count(words):
    learner = learner_of(words, cap=2.0)
    data = split(store_of_ids(random_documents(words, (30, 45))))
    examples = learner.examples(data, 32)
    predictor, labels = learner.predictors(data, examples)["glove"], rows_of(examples, len(examples.plan(0)))
    labels = labels.targets["glove"].labels.numpy()
    loss = predictor.losses(labels).sum()
    for other in (-0.01, 0.01):
        assert loss < (labels[:, 1] * (labels[:, 0] - predictor.value - other) ** 2).sum()


def test_inspection_finds_wrong_counts(words):
    learner = learner_of(words)
    examples = learner.examples(split(store_of_ids(random_documents(words, (30, 45, 3)))), 32)
    assert not learner.inspector(examples, 32).measure(1000).broken()
    (first, *_) = learner.inspector(examples, 32).describe(1)
    assert len(first["input"]["ids"]) == 2 and "times, weight" in first["targets"]["glove"]
    examples.plan(0).rows["count"][3] += 1
    names = {statistic.name for statistic in learner.inspector(examples, 32).measure(1000).broken()}
    assert names == {"sums of counts that differ from the text's", "counts that differ from those of the reverse pair"}


def test_text_without_two_known_words_is_refused(words):
    with pytest.raises(UserError, match="no two words of the vocabulary in a document"):
        learner_of(words).examples(split(store_of_ids([[words.role("unk")] * 9, [6]])), 32)


def test_several_texts_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat\n" * 9)
    words = ["pretrain", "model=word_vectors_tiny", "objective=glove", "data=mixture", "data.members=[text,pydocs]"]
    assert cli.main([*words, "data.with.text.path=text.txt", "max_steps=1"]) == 2
    said = capsys.readouterr().err
    assert "objective=glove counts words in one text" in said and "data.path=[FOLDER,FOLDER]" in said


def test_resumed_run_equals_uninterrupted_run_and_learns(tmp_path, capsys):
    fields = ["objective=glove", "batch_tokens=256", "optimizer.lr=0.05", "schedule=constant", "max_epochs=null"]
    with working_in(tmp_path):
        whole = pretrain("whole", *fields, "max_steps=60", model="word_vectors_tiny")
        pretrain("parted", *fields, "max_steps=30", model="word_vectors_tiny")
        parted = pretrain("parted", *fields, "max_steps=60", model="word_vectors_tiny")
        first, second = (load_file(run / "checkpoints/step_00000060/model.safetensors") for run in (whole, parted))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
        assert first["heads.glove.total"].item() > 100
        metrics = json.loads((whole / "result.json").read_text())["metrics"]
        assert metrics["glove_loss"] < 0.6 * metrics["glove_baseline"]
        capsys.readouterr()
        assert cli.main(["predict", "checkpoint=runs/whole", "text=cat"]) == 0
        assert capsys.readouterr().out.startswith("cat  ")
        assert cli.main(["export", "checkpoint=runs/whole", "format=vectors", "output=text"]) == 0
