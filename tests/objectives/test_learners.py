"""The learner of every objective over tiny backbones: losses, gradients, scores, samples and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import objective_fixtures
import pytest
import torch
from objective_fixtures import WORDS, backbone, rows_of, sentences, split, store, tokenizer
from pydantic import create_model

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.learners.base import Inference
from lmtool.learners.evaluation import TermScorer, evaluate
from lmtool.models.configs import GptConfig
from lmtool.models.decoder_configs import TransformerXlConfig
from lmtool.models.pretransformer_configs import LstmConfig
from lmtool.objectives.clm import CausalLanguageModel, SequenceAutoencoder
from lmtool.objectives.configs import (
    ClmConfig,
    DenoisingConfig,
    MlmConfig,
    PlmConfig,
    PrefixLmConfig,
    RtdConfig,
    SequenceAutoencoderConfig,
    SpanConfig,
    SpanCorruptionConfig,
)
from lmtool.objectives.plm import PermutationLanguageModel
from lmtool.objectives.sequence_to_sequence import (
    Denoising,
    PrefixDecoder,
    PrefixSequenceToSequence,
    SequenceToSequence,
)
from lmtool.training.precision import FP32_CPU

OBJECTIVES = {
    "mlm": ("bert", MlmConfig(), "joined"),
    "mlm separate": ("bert", MlmConfig(whole_word=True), "separate"),
    "nsp": ("bert", MlmConfig(pairs="nsp"), "joined"),
    "sop": ("bert", MlmConfig(pairs="sop"), "joined"),
    "span": ("bert", SpanConfig(), "joined"),
    "ngram": (
        "bert",
        SpanConfig(lengths="harmonic", longest=3, replace="token", boundary=False, pairs="sop"),
        "joined",
    ),
    "ngram enhanced": (
        "deberta",
        SpanConfig(lengths="harmonic", longest=3, replace="token", boundary=False, enhanced_decoder=True),
        "joined",
    ),
    "plm": ("xlnet", PlmConfig(reuse=20), "joined"),
    "plm pairs": ("xlnet", PlmConfig(pairs="unscored"), "joined"),
    "rtd": ("bert", RtdConfig(), "joined"),
    "rtd enhanced": (
        "deberta",
        RtdConfig(mask=1.0, generator_size=1.0, generator_layers=0.5, sharing="gdes", enhanced_decoder=True),
        "joined",
    ),
    "electra_15": ("bert", RtdConfig(variant="electra_15"), "separate"),
    "replace_mlm": ("bert", RtdConfig(variant="replace_mlm"), "joined"),
    "all_tokens_mlm": ("bert", RtdConfig(variant="all_tokens_mlm"), "joined"),
    "prefix_lm gpt": ("gpt", PrefixLmConfig(), "joined"),
    "prefix_lm t5": ("t5", PrefixLmConfig(), "separate"),
    "sequence_autoencoder": ("lstm", SequenceAutoencoderConfig(), "joined"),
    "sequence_autoencoder separate": ("lstm", SequenceAutoencoderConfig(), "separate"),
    "span_corruption": ("t5", SpanCorruptionConfig(), "joined"),
    "span_corruption separate": ("t5", SpanCorruptionConfig(), "separate"),
    "denoising": ("bart", DenoisingConfig(token_masking=0.1, token_deletion=0.1, document_rotation=0.5), "joined"),
    "denoising t5": ("t5", DenoisingConfig(), "separate"),
    "clm": ("gpt", ClmConfig(), "joined"),
    "clm separate": ("gpt", ClmConfig(), "separate"),
}


@pytest.fixture(scope="module")
def tokenizers():
    return objective_fixtures.tokenizers()


@pytest.fixture
def built(request, tokenizers):
    family, config, documents = OBJECTIVES[request.param]
    tokens = tokenizers[family]
    learner = build(config, backbone(family), tokens, 3)
    data = store(tokens)
    return learner, learner.examples(split(data, documents), 32), data


def gradients(learner):
    return {
        name: parameter.grad.clone() for name, parameter in learner.named_parameters() if parameter.grad is not None
    }


def run(learner, batches):
    """Mean losses and gradients of one step over micro-batches, each term divided by its count over the step."""
    learner.zero_grad()
    counts = {name: sum(learner.counts(batch)[name] for batch in batches) for name in learner.loss_weights}
    losses = dict.fromkeys(counts, 0.0)
    for batch in batches:
        output = learner(batch, 1)
        total = sum(output.loss_weights[name] * loss_sum / counts[name] for name, loss_sum in output.sums.items())
        total.backward()
        losses = {name: losses[name] + loss_sum.item() / counts[name] for name, loss_sum in output.sums.items()}
    return losses, gradients(learner)


@pytest.mark.parametrize("built", OBJECTIVES, indirect=True)
@pytest.mark.parametrize("training", [True, False])
def test_packed_batch_matches_single_examples(built, training):
    """A batch of eight and eight batches of one have the same losses and gradients, with dropout too."""
    learner, examples, _ = built
    learner.train(training)
    rows = examples.plan(0).rows
    whole, whole_gradients = run(learner, [rows_of(examples, 8)])
    single = [examples.batch(rows[[number]], np.array([number]), 0) for number in range(8)]
    parts, part_gradients = run(learner, single)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert whole_gradients.keys() == part_gradients.keys()
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("built", OBJECTIVES, indirect=True)
def test_all_parameters_have_gradients_and_initial_loss_is_uniform(built):
    learner, examples, _ = built
    learner.train()
    losses, grads = run(learner, [rows_of(examples, 8)])
    assert set(grads) == {name for name, _ in learner.named_parameters()}
    for name, loss in losses.items():
        rows = learner.backbone.config.vocab_size
        guess = math.log(2) if name in ("nsp", "sop", "rtd") else math.log(rows)
        if name == "all_tokens_mlm":
            # The initial copy gate is 0.5, and 85% of the tokens can be copied.
            guess = 0.85 * math.log(2) + 0.15 * math.log(2 * rows)
        # T5's initial token table has a large scale, so that the first predictions are not uniform.
        assert loss == pytest.approx(guess, abs=1.5 if learner.backbone.config.name == "t5" else 0.4)


@pytest.mark.parametrize("built", OBJECTIVES, indirect=True)
def test_scores_sum_to_the_loss_and_name_their_examples(built):
    learner, examples, _ = built
    learner.eval()
    batch = rows_of(examples, 6)
    output, scores = learner(batch, 0), learner.score(batch)  # evaluation uses the samples of step 0
    assert set(scores) == set(output.sums) == set(learner.loss_weights)
    for name, term in scores.items():
        assert set(term.documents.tolist()) == set(range(6))
        assert len(term.losses) == len(term.predictions) == len(term.labels)
        if isinstance(learner, SequenceToSequence):
            # Only text tokens are scored; another test compares their losses with the model's.
            text = ~np.isin(batch.targets[name].labels.numpy(), list(learner.tokenizer.special_ids))
            assert len(term.losses) == text.sum() < learner.counts(batch)[name]
            assert term.losses.sum() < output.sums[name]
            continue
        assert term.losses.sum().item() == pytest.approx(output.sums[name].item(), rel=1e-5)
        assert len(term.losses) == learner.counts(batch)[name]


@pytest.mark.parametrize(
    "built", ["nsp", "sop", "span", "prefix_lm gpt", "denoising", "clm", "sequence_autoencoder"], indirect=True
)
def test_evaluation_matches_one_batch_and_has_baselines(built):
    learner, examples, data = built
    learner.train()
    loader = PackedLoader(examples, seed=1, batch_tokens=100, shuffle=False)
    evaluation = evaluate(
        learner, TermScorer(learner, learner.predictors(split(data), examples)), loader.epoch_batches(0)
    )
    again = evaluate(learner, TermScorer(learner), [rows_of(examples, len(examples.plan(0)))])
    assert learner.training
    assert evaluation.loss == pytest.approx(again.loss, rel=1e-5)
    for name, term in evaluation.terms.items():
        assert term.count == again.terms[name].count
        assert len(term.sums_E) == len(examples.plan(0))
        assert term.standard_error > 0
        # An untrained model predicts uniformly; unigram frequencies are better.
        assert term.baseline < term.loss + 0.05
    weights = evaluation.loss_weights
    of_loss, of_gain = (
        sum((weights[name] * getattr(term, error)) ** 2 for name, term in evaluation.terms.items()) ** 0.5
        for error in ("standard_error", "gain_standard_error")
    )
    assert evaluation.metrics()["standard_error"] == pytest.approx(of_loss) != pytest.approx(of_gain)
    assert evaluation.metrics()["gain_standard_error"] == pytest.approx(of_gain)
    assert "gain_standard_error" not in again.metrics(), "without a baseline"
    metrics = evaluation.metrics()
    assert metrics["loss"] == evaluation.loss and all(np.isfinite(list(metrics.values())))


def test_unigram_baseline_counts_tokens_without_special_ones(tokenizers):
    tokens = tokenizers["bert"]
    learner = build(MlmConfig(), backbone(), tokens, 0)
    data = store(tokens)
    losses = learner.predictors(split(data), learner.examples(split(data, "joined", "train"), 32))["mlm"].losses_C
    counts = np.bincount(data.tokens, minlength=tokens.vocab_size) + 1.0
    counts[list(tokens.special_ids)] = 0
    assert np.exp(-losses) == pytest.approx(counts / counts.sum())


def test_clm_predicts_every_token_once(tokenizers):
    tokens = tokenizers["gpt"]
    learner = build(ClmConfig(), backbone("gpt"), tokens, 0)
    data = store(tokens)
    end = tokens.role("eos")
    run_of_text = np.concatenate([np.r_[data.document(number), end] for number in range(len(data))])
    examples = learner.examples(split(data, "joined", "train"), 16)
    batch = rows_of(examples, len(examples.plan(0)))
    assert np.array_equal(batch.targets["clm"].labels.numpy(), run_of_text[1:])
    separate = learner.examples(split(data, "separate", "train"), 16)
    batch = rows_of(separate, len(separate.plan(0)))
    assert len(batch.targets["clm"].labels) == len(run_of_text) - len(data)
    assert (batch.targets["clm"].labels == end).sum() == len(data)


def test_nsp_pairs_have_segments_and_change_per_epoch(tokenizers):
    tokens = tokenizers["bert"]
    learner = build(MlmConfig(pairs="nsp"), backbone(), tokens, 0)
    examples = learner.examples(split(store(tokens), "joined", "train"), 32)
    batch = rows_of(examples, 12)
    assert max(batch.inputs.lengths) <= 32
    for start, length in zip(batch.inputs.starts, batch.inputs.lengths, strict=True):
        ids = batch.inputs.tokens[start : start + length]
        assert ids[0] == tokens.role("cls") and ids[-1] == tokens.role("sep")
        segment = batch.inputs.columns["segment"][start : start + length]
        assert (segment.diff() >= 0).all() and segment[0] == 0 and segment[-1] == 1
        assert ids[int((segment == 0).sum()) - 1] == tokens.role("sep")
    assert not np.array_equal(examples.plan(0).rows[:12], examples.plan(1).rows[:12])
    static = build(MlmConfig(pairs="nsp", masking="static", duplicates=2), backbone(), tokens, 0)
    static = static.examples(split(store(tokens)), 32)
    first, third = rows_of(static, 8, epoch=0), rows_of(static, 8, epoch=2)
    assert torch.equal(first.inputs.tokens, third.inputs.tokens)
    assert not torch.equal(first.inputs.tokens, rows_of(static, 8, epoch=1).inputs.tokens[: len(first.inputs.tokens)])


def test_samples_contain_pieces_truths_and_guesses(tokenizers):
    tokens = tokenizers["bert"]
    learner = build(MlmConfig(), backbone(), tokens, 0).eval()
    data = store(tokens)
    examples = learner.examples(split(data, "separate", "validation"), 32)
    samples = learner.samples(rows_of(examples, 5), 3)
    assert len(samples) == 3
    for sample, row in zip(samples, examples.plan(0).rows, strict=False):
        text = data.tokens[row["start"] : row["start"] + row["length"]]
        assert sample["pieces"] == ["[CLS]", *tokens.pieces(text), "[SEP]"]
        for place in sample["masked"]:
            assert sample["pieces"][place["position"]] == place["truth"]
            fractions = [probability for _, probability in place["guesses"]]
            assert len(fractions) == 5 and fractions == sorted(fractions, reverse=True) and 0 < fractions[0] <= 1


def test_training_lowers_the_mlm_loss(tokenizers):
    learner = build(MlmConfig(), backbone(), tokenizers["bert"], 0).train()
    examples = learner.examples(split(store(tokenizers["bert"]), "joined", "train"), 32)
    batch = rows_of(examples, 16)
    optimizer = torch.optim.AdamW(learner.parameters(), 3e-3)
    losses = []
    for step in range(1, 31):
        output = learner(batch, step)
        loss = output.sums["mlm"] / learner.counts(batch)["mlm"]
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1.5


def test_too_little_text_or_missing_mask_token_is_refused(tokenizers):
    tokens = tokenizers["bert"]
    learner = build(MlmConfig(pairs="nsp"), backbone(), tokens, 0)
    with pytest.raises(UserError, match="two documents"):
        learner.examples(split(store(tokens, sentences(1))), 32).plan(0)
    with pytest.raises(UserError, match="max_length=5"):
        learner.examples(split(store(tokens), "joined", "train"), 5)
    with pytest.raises(UserError, match="no mask token"):
        build(MlmConfig(), backbone(), tokenizers["gpt"], 0).examples(split(store(tokens)), 32)


@pytest.mark.parametrize("built", ["prefix_lm t5", "span_corruption", "denoising"], indirect=True)
def test_outputs_are_shifted_labels_within_planned_lengths(built):
    learner, examples, _ = built
    plan = examples.plan(0)
    batch = rows_of(examples, len(plan))
    both = np.array(batch.inputs.lengths) + np.array(batch.outputs.lengths)
    exact = learner.term != "denoising"
    assert (both == plan.lengths).all() if exact else (both <= plan.lengths).all()
    # A split leaves at least one token on both sides.
    assert max(*batch.inputs.lengths, *batch.outputs.lengths) == (31 if learner.term == "prefix_lm" else 32)
    config, tokens = learner.backbone.config, learner.tokenizer
    labels = batch.targets[learner.term].labels
    for start, length in zip(batch.outputs.starts, batch.outputs.lengths, strict=True):
        read, predicted = batch.outputs.tokens[start : start + length], labels[start : start + length]
        assert read[0] == tokens.role(config.start_role) and predicted[-1] == tokens.role("eos")
        assert torch.equal(read[1:], predicted[:-1])


@pytest.mark.parametrize("built", ["span_corruption", "denoising"], indirect=True)
def test_encoder_decoder_scores_cover_text_tokens_only(built):
    learner, examples, _ = built
    learner.eval()
    batch = rows_of(examples, 4)
    scores = learner.score(batch)[learner.term]
    with torch.no_grad():
        hidden = learner.backbone(batch.inputs, None, batch.outputs)
        logits = learner.heads["lm"](hidden, learner.backbone.embed.token.weight)
        each = torch.nn.functional.cross_entropy(logits, batch.targets[learner.term].labels, reduction="none")
    text = [
        number
        for number, label in enumerate(batch.targets[learner.term].labels.tolist())
        if label not in learner.tokenizer.special_ids
    ]
    torch.testing.assert_close(scores.losses, each[text])
    assert learner.samples(batch, 2)[0].keys() == {"prompt", "text"}


def test_prefix_lm_attends_to_the_whole_prefix_and_earlier_tokens(tokenizers):
    """Hidden states depend on tokens as the prefix mask allows, and targets start at the end of the prefix."""
    learner = build(PrefixLmConfig(), backbone("gpt"), tokenizers["gpt"], 0).eval()
    examples = learner.examples(split(store(tokenizers["gpt"]), "joined", "train"), 12)
    batch = rows_of(examples, 3)
    packed, at = batch.inputs, batch.targets["prefix_lm"].at
    for number, (start, length, prefix) in enumerate(zip(packed.starts, packed.lengths, packed.prefixes, strict=True)):
        own = at[packed.documents[at] == number]
        assert own.tolist() == list(range(start + prefix - 1, start + length - 1))
    vectors = learner.backbone.embed.tokens(packed.tokens).detach().requires_grad_()
    learner.backbone.embed.tokens = lambda ids: vectors
    hidden = learner.backbone(packed)
    start, length, prefix = packed.starts[1], packed.lengths[1], packed.prefixes[1]
    for query in range(length):
        (gradient,) = torch.autograd.grad(hidden[start + query, 0], vectors, retain_graph=True)
        seen = (gradient.abs().sum(1) > 0).nonzero().flatten().tolist()
        assert seen == [start + key for key in range(length) if key <= query or key < prefix]


def test_sequence_autoencoder_reads_each_text_then_writes_it(tokenizers):
    """The examples, made again in plain Python."""
    tokens = tokenizers["lstm"]
    data, end = store(tokens), tokens.role("eos")
    learner = build(SequenceAutoencoderConfig(), backbone("lstm"), tokens, 0).eval()
    examples = learner.examples(split(data, "separate", "train"), 20)  # 9 tokens to read, an end, 9 tokens to write
    texts = []
    for number in range(len(data)):
        document = data.document(number).tolist()
        pieces = [document[start : start + 9] for start in range(0, len(document), 9)]
        texts += [piece for piece in pieces if len(piece) > 1]
    plan = examples.plan(0)
    assert plan.lengths.tolist() == [2 * len(text) + 1 for text in texts] and plan.lengths.max() == 19
    batch = rows_of(examples, len(plan))
    assert batch.inputs.tokens.tolist() == [token for text in texts for token in (*text, end, *text)]
    target = batch.targets["sequence_autoencoder"]
    assert target.labels.tolist() == [token for text in texts for token in (*text, end)]
    starts = np.cumsum([0, *plan.lengths])[:-1]
    written = [range(start + len(text), start + 2 * len(text) + 1) for start, text in zip(starts, texts, strict=True)]
    assert target.at.tolist() == [place for places in written for place in places]
    assert learner.ends(examples) == (target.labels == end).sum() == len(texts)


def test_sequence_autoencoder_refuses_models_with_attention():
    for model in (GptConfig(), TransformerXlConfig()):
        problem = SequenceAutoencoderConfig().first_conflict(model)
        assert "can copy it by attention" in problem.message and "set model=lstm" in problem.hint
    assert SequenceAutoencoderConfig().first_conflict(LstmConfig()) is None


def test_sequence_autoencoder_learns_to_repeat_texts(tokenizers):
    """The samples of a model that memorized short texts are these texts."""
    tokens = tokenizers["lstm"]
    texts = ["cat sat", "dogs watched", "birds cross", "quiet river"]
    learner = build(SequenceAutoencoderConfig(), backbone("lstm", dropout=0.0, num_layers=1), tokens, 0).train()
    examples = learner.examples(split(store(tokens, [[text] for text in texts]), "separate", "train"), 32)
    batch = rows_of(examples, 4)
    optimizer = torch.optim.AdamW(learner.parameters(), 3e-2)
    for step in range(1, 101):
        (learner(batch, step).sums["sequence_autoencoder"] / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    samples = learner.eval().samples(batch, 4)
    assert [sample["prompt"] for sample in samples] == [sample["text"] for sample in samples] == texts


@pytest.mark.parametrize(
    ("family", "config", "learner_class", "term"),
    [
        ("gpt", ClmConfig, CausalLanguageModel, "clm"),
        ("lstm", SequenceAutoencoderConfig, SequenceAutoencoder, "sequence_autoencoder"),
        ("gpt", PrefixLmConfig, PrefixDecoder, "prefix_lm"),
        ("t5", PrefixLmConfig, PrefixSequenceToSequence, "prefix_lm"),
        ("xlnet", PlmConfig, PermutationLanguageModel, "plm"),
        ("bart", DenoisingConfig, Denoising, "derived"),
    ],
)
def test_derived_objectives_of_another_name_learn_the_targets_of_their_examples(
    tokenizers, family, config, learner_class, term
):
    """As a plugin's objective does, see docs/extend.md."""
    derived = create_model("Derived", __base__=config, name=(Literal["derived"], "derived"))()
    learner = learner_class(derived, backbone(family), tokenizers[family], 0)
    batch = rows_of(learner.examples(split(store(tokenizers[family]), "separate", "train"), 32), 4)
    assert set(batch.targets) == set(learner(batch, 1).sums) == set(learner.score(batch)) == {term}


def test_span_corruption_without_enough_sentinels_is_refused(tokenizers):
    learner = build(SpanCorruptionConfig(), backbone("t5"), tokenizers["gpt"], 0)
    with pytest.raises(UserError, match="2 sentinel tokens at max_length=32, but the tokenizer has 0"):
        learner.examples(split(store(tokenizers["gpt"]), "joined", "train"), 32)
    learner = build(SpanCorruptionConfig(density=0.5, mean_length=1.0), backbone("t5"), tokenizers["t5"], 0)
    with pytest.raises(UserError, match="sentinel tokens at max_length=60, but the tokenizer has 12"):
        learner.examples(split(store(tokenizers["t5"]), "joined", "train"), 60)


@pytest.mark.parametrize(("family", "config"), [("gpt", ClmConfig), ("bart", DenoisingConfig)])
def test_label_smoothing_applies_to_training_only(tokenizers, family, config):
    plain, smooth = (
        build(config(label_smoothing=rate), backbone(family), tokenizers[family], 3).eval() for rate in (0.0, 0.1)
    )
    batch = rows_of(plain.examples(split(store(tokenizers[family])), 32), 4)
    (term,) = plain.loss_weights
    with torch.no_grad():
        hidden = plain.backbone(batch.inputs, None, *([batch.outputs] if batch.outputs else []))
        target = batch.targets[term]
        logits = plain.heads["lm"](hidden[target.at], plain.backbone.embed.token.weight)
        wanted = torch.nn.functional.cross_entropy(logits, target.labels, reduction="sum", label_smoothing=0.1)
        torch.testing.assert_close(smooth(batch, 1).sums[term], wanted)
        torch.testing.assert_close(smooth.score(batch)[term].losses, plain.score(batch)[term].losses)


def test_tokenizer_without_eos_continues_non_empty_texts():
    """The only special token of GPT of 2018 is <unk>."""
    tokens = tokenizer("bytebpe")
    tokens.roles = {}
    learner = build(ClmConfig(), backbone("gpt"), tokens, 0).eval()
    (row,) = learner.responder().answers(Rows.of_texts(text=["the old cat"]), Inference(32, 100, FP32_CPU)).records
    assert row["text"] == "the old cat" and row["continuation"]
    with pytest.raises(UserError, match="no eos token"):
        next(learner.responder().answers(Rows.of_texts(text=[""]), Inference(32, 100, FP32_CPU)).records)


@pytest.mark.parametrize("lone", [0, 190])
def test_nsp_warns_about_documents_of_one_sentence(lone):
    """A document of one sentence has no next sentence, so that its second segment is always random."""
    tokens = tokenizer()
    sizes = [1] * lone + [6] * (200 - lone)
    documents = [[f"{' '.join(WORDS[n % 7 : n % 7 + 6])}." for n in range(size)] for size in sizes]
    learner = build(MlmConfig(pairs="nsp"), backbone(), tokens, 3)
    metadata = learner.examples(split(store(tokens, documents)), 32).metadata()
    assert metadata["documents_of_one_sentence"] == lone
    if not lone:
        assert "warnings" not in metadata and 0.4 < metadata["random_next_fraction"] < 0.65
        return
    (warning,) = metadata["warnings"]
    assert metadata["random_next_fraction"] > 0.65
    assert "95% of the train documents have a single sentence" in warning and "data.document=file" in warning
    held_out = replace(split(store(tokens, documents)), split="validation")
    assert "warnings" not in learner.examples(held_out, 32).metadata()  # said once, of the training text


@torch.no_grad()
def test_enhanced_decoder_changes_the_generator_loss_only(tokenizers):
    """With the same weights and samples, only the generator's loss differs."""
    tokens, fields = tokenizers["bert"], {"generator_size": 1.0, "sharing": "gdes"}
    plain = build(RtdConfig(**fields), backbone("deberta"), tokens, 3)
    enhanced = build(RtdConfig(**fields, enhanced_decoder=True), backbone("deberta"), tokens, 3)
    own = {"objective.masked_lm.absolute.weight"}
    assert enhanced.state_dict().keys() - plain.state_dict().keys() == own
    assert all(torch.equal(tensor, enhanced.state_dict()[name]) for name, tensor in plain.state_dict().items())
    batch = rows_of(plain.examples(split(store(tokens)), 32), 8)
    assert not torch.allclose(plain(batch, 1).sums["mlm"], enhanced(batch, 1).sums["mlm"])
    filled = plain.fill_masks(batch, plain._generator_hidden(batch, None), 0)
    assert torch.equal(
        plain.model_forward(batch, filled, None).hidden_MH, enhanced.model_forward(batch, filled, None).hidden_MH
    )


@pytest.mark.parametrize(
    "config,fields", [(MlmConfig, {"pairs": "nsp"}), (SpanConfig, {"boundary": True}), (SpanConfig, {"pairs": "sop"})]
)
def test_enhanced_decoder_with_second_loss_is_refused(config, fields):
    with pytest.raises(ValueError, match="cannot be combined with a second loss"):
        config(**{"boundary": False} | fields if config is SpanConfig else fields, enhanced_decoder=True)
