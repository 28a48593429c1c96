"""Replaced-token detection: the generator, its samples, shared embeddings, and the variants of ELECTRA."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from objective_fixtures import SIZES, backbone, rows_of, split, store, tokenizer
from scipy import stats

from lmtool.config.registry import build, names
from lmtool.errors import UserError
from lmtool.learners.baseline import BestConstant
from lmtool.learners.evaluation import TermScorer, evaluate
from lmtool.models.configs import BertConfig
from lmtool.models.encoder_configs import ElectraConfig
from lmtool.objectives.configs import RtdConfig
from lmtool.objectives.rtd import DELTA, sample_from


@pytest.fixture(scope="module")
def tokens():
    return tokenizer()


def built(tokens, model=None, **fields):
    learner = build(RtdConfig(**fields), backbone(**(model or {})), tokens, 3)
    return learner, learner.examples(split(store(tokens), "joined", "train"), 32)


def gradients(learner, batch, step=1, terms=None):
    learner.zero_grad()
    learner.on_step(step)
    sums = learner(batch, step).sums
    sum(value for name, value in sums.items() if terms is None or name in terms).backward()
    return {
        name
        for name, parameter in learner.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0
    }


def test_sample_from_follows_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -2.0, -torch.inf, 3.0]]).expand(20000, 5)
    uniform = torch.from_numpy(np.random.default_rng(0).random(20000))
    counts = torch.bincount(sample_from(logits, uniform), minlength=5).numpy()
    fractions = logits[0].softmax(0).double().numpy()
    assert counts[3] == 0
    kept = fractions > 0
    assert stats.chisquare(counts[kept], 20000 * fractions[kept] / fractions[kept].sum()).pvalue > 1e-3
    ends = sample_from(torch.zeros(2, 7), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ends.tolist() == [0, 6]


def test_samples_depend_on_step_and_example_only(tokens):
    learner, examples = built(tokens)
    learner.eval()
    batch = rows_of(examples, 8)

    def filled(step, given=batch):
        at = given.targets["mlm"].at
        return learner.fill_masks(given, learner.generator(given.inputs)[at], step).tokens

    with torch.no_grad():
        assert torch.equal(filled(1), filled(1)) and not torch.equal(filled(1), filled(2))
        last = examples.batch(examples.plan(0).rows[[7]], np.array([7]), 0)
        assert torch.equal(filled(1)[-last.inputs.lengths[0] :], filled(1, last))
        at = batch.targets["mlm"].at
        changed = filled(1) != batch.inputs.tokens
        assert set(changed.nonzero().flatten().tolist()) <= set(at.tolist())
        assert filled(1).max() < tokens.vocab_size < learner.backbone.config.vocab_size


def test_shared_embedding_has_separate_dropout_per_model(tokens):
    learner, examples = built(tokens, {"dropout": 0.3}, generator_size=0.5)
    masks = []
    learner.backbone.embed.dropout.register_forward_hook(lambda module, inputs, out: masks.append(out == 0))
    learner.train()(rows_of(examples, 8), 1)
    of_generator, of_model = masks
    agreement = (of_generator == of_model).double().mean()
    assert agreement == pytest.approx(0.3**2 + 0.7**2, abs=0.03)


def test_correct_sample_is_labeled_as_original(tokens, monkeypatch):
    learner, examples = built(tokens)
    batch = rows_of(examples, 8)
    at, labels = batch.targets["mlm"].at, batch.targets["mlm"].labels
    right = torch.arange(len(at)) % 2 == 0
    monkeypatch.setattr(
        "lmtool.objectives.rtd.sample_tokens",
        lambda *_: torch.where(right, labels, (labels + 1) % tokens.vocab_size),
    )
    scored = learner.eval().score(batch)["rtd"]
    assert len(scored.labels) == len(batch.inputs.tokens)
    assert scored.labels.nonzero().flatten().tolist() == at[~right].tolist()
    learner, _ = built(tokens, variant="electra_15")
    assert torch.equal(learner.eval().score(batch)["rtd"].labels, (~right).long())


def test_samples_pass_no_gradient_to_the_generator(tokens):
    learner, examples = built(tokens)
    batch = rows_of(examples, 8)
    generators = gradients(learner, batch, terms={"mlm"})
    models = gradients(learner, batch, terms={"rtd"})
    shared = {name for name in generators if name.startswith("backbone.embed.")}
    assert shared and generators - shared == {name for name in generators if name.startswith("objective.")}
    assert not any(name.startswith("objective.") for name in models)
    assert generators & models == shared
    assert generators | models == {name for name, _ in learner.named_parameters()}


@pytest.mark.parametrize("size", [0.25, 1.0])
def test_embeddings_are_shared_and_saved_under_both_names(tokens, size):
    learner, _ = built(tokens, generator_size=size)
    ours, theirs = learner.backbone.embed, learner.generator.embed
    assert ours.token.weight is theirs.token.weight and ours.position is theirs.position
    state = learner.state_dict()
    aliases = [name for name in state if name.startswith("objective.") and name.endswith("token.weight")]
    assert len(aliases) == 1
    assert state[aliases[0]].data_ptr() == state["backbone.embed.token.weight"].data_ptr()
    assert not any(name.endswith("token.weight") and name in aliases for name, _ in learner.named_parameters())
    # A generator of the model's size has different initial weights.
    if size == 1.0:
        assert not torch.equal(
            learner.generator.layers[0].ffn.fc_in.weight, learner.backbone.layers[0].ffn.fc_in.weight
        )


def test_scaled_generator_sizes_match_the_paper():
    base = BertConfig().scaled(1 / 3, 1.0)
    assert (base.hidden_size, base.num_heads, base.feedforward_size, base.num_layers) == (256, 4, 1024, 12)
    large = BertConfig(hidden_size=1024, num_heads=16, feedforward_size=4096, num_layers=24).scaled(0.25, 0.5)
    assert (large.hidden_size, large.num_heads, large.feedforward_size, large.num_layers) == (256, 4, 1024, 12)
    tiny = BertConfig(hidden_size=128, num_heads=2, feedforward_size=512).scaled(0.25, 1.0)
    assert (tiny.hidden_size, tiny.num_heads, tiny.feedforward_size) == (32, 1, 128)


@pytest.mark.parametrize("kind", [name for name in names("model/positions") if not name.startswith("tree_")])
def test_every_kind_of_positions_has_gradients(tokens, kind):
    model = json.loads(BertConfig(**{"vocab_size": 400}).model_dump_json())
    chosen = BertConfig.model_validate_json(json.dumps({**model, "positions": {"name": kind}})).positions
    learner, examples = built(tokens, {"positions": chosen})
    batch = rows_of(examples, 4)
    assert gradients(learner.eval(), batch) == {name for name, _ in learner.named_parameters()}


def test_two_stage_training_starts_the_model_from_the_generator(tokens):
    learner, examples = built(tokens, training="two_stage", generator_size=1.0, generator_steps=3)
    learner.train()
    batch = rows_of(examples, 8)
    assert learner.generator.embed.token.weight is not learner.backbone.embed.token.weight
    assert set(learner(batch, 3).sums) == {"mlm"} and set(learner(batch, 4).sums) == {"rtd"}
    assert all(name.startswith("objective.") for name in gradients(learner, batch, step=3))
    before = learner.backbone.layers[0].ffn.fc_in.weight.clone()
    assert not any(name.startswith("objective.") for name in gradients(learner, batch, step=4))
    for name, parameter in learner.generator.named_parameters():
        assert torch.equal(parameter, dict(learner.backbone.named_parameters())[name])
    assert not torch.equal(before, learner.backbone.layers[0].ffn.fc_in.weight)
    # A smaller generator initializes only the layers that it has.
    learner, _ = built(tokens, training="two_stage", generator_layers=0.5, generator_size=1.0, generator_steps=3)
    last = learner.backbone.layers[1].ffn.fc_in.weight.clone()
    learner.on_step(4)
    assert torch.equal(last, learner.backbone.layers[1].ffn.fc_in.weight)
    assert torch.equal(learner.generator.layers[0].norm1.weight, learner.backbone.layers[0].norm1.weight)


def test_copy_gate_mixes_copy_and_vocabulary_distributions(tokens):
    learner, examples = built(tokens, variant="all_tokens_mlm")
    learner.eval()
    batch = rows_of(examples, 3)
    scored = learner.score(batch)["all_tokens_mlm"]
    with torch.no_grad():
        at = batch.targets["mlm"].at
        filled = learner.fill_masks(batch, learner.generator(batch.inputs)[at], 0)
        places = batch.targets["all_tokens_mlm"].at
        hidden = learner.backbone(filled)[places]
        copy = learner.heads["copy"](hidden).sigmoid()[:, None]
        fractions = (1 - copy) * learner.heads["masked_lm"](hidden, learner.backbone.embed.token.weight).softmax(-1)
        fractions = fractions.scatter_add(1, filled.tokens[places][:, None], copy)
    torch.testing.assert_close(fractions.sum(1), torch.ones(len(fractions)))
    labels = batch.targets["all_tokens_mlm"].labels
    torch.testing.assert_close(scored.losses, -fractions.gather(1, labels[:, None])[:, 0].log())
    assert torch.equal(scored.predictions, fractions.argmax(1))
    assert set(at.tolist()) < set(places.tolist())


def test_baseline_is_the_entropy_of_the_replaced_rate(tokens):
    learner, examples = built(tokens)
    batches = [rows_of(examples, 6), rows_of(examples, 12)]
    evaluation = evaluate(
        learner, TermScorer(learner, learner.predictors(split(store(tokens)), examples)), batches[1:]
    ).terms["rtd"]
    labels = learner.eval().score(batches[1])["rtd"].labels.double()
    rate = labels.mean().item()
    assert evaluation.baseline == pytest.approx(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))
    assert BestConstant("base rate", (0.85, 0.15)).expected_loss == pytest.approx(0.4227, abs=1e-4)
    assert BestConstant.least_loss(np.array([7, 0])) == 0


def test_samples_contain_replacement_probabilities(tokens):
    learner, examples = built(tokens)
    batch = rows_of(examples, 4)
    samples = learner.eval().samples(batch, 3)
    assert len(samples) == 3 and all(sample["masked"] for sample in samples)
    assert all(len(sample["replaced"]) == len(sample["pieces"]) for sample in samples)
    assert all(0 < probability < 1 for sample in samples for probability in sample["replaced"])
    for place in (place for sample in samples for place in sample["masked"]):
        assert place["sampled"] and len(place["guesses"]) == 5


def test_factorized_embeddings_are_shared_at_embedding_size(tokens):
    config = ElectraConfig(**{**SIZES, "embedding_size": 12})
    learner = build(RtdConfig(), build(config, 0), tokens, 3)
    ours, theirs = learner.backbone.embed, learner.generator.embed
    assert ours.token.weight is theirs.token.weight and ours.token.weight.shape == (400, 12)
    assert ours.norm is theirs.norm and ours.position is theirs.position
    examples = learner.examples(split(store(tokens), "joined", "train"), 32)
    assert gradients(learner, rows_of(examples, 4)) == {name for name, _ in learner.named_parameters()}


def test_gdes_separates_gradients_and_restores_both_tables(tokens):
    """Each table has the gradient of its loss; the model reads their sum; a checkpoint restores both bit for bit."""
    learner, examples = built(tokens, sharing="gdes", generator_size=1.0)
    batch = rows_of(examples, 8)
    generators, models = gradients(learner, batch, terms={"mlm"}), gradients(learner, batch, terms={"rtd"})
    table = "objective.generator.embed.token.weight"
    assert table in generators and table not in models
    assert DELTA in models and DELTA not in generators and not generators & models
    assert not any(name.startswith("backbone.embed.token") for name, _ in learner.named_parameters())
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.01)
    for step in (1, 2):
        optimizer.zero_grad()
        sum(learner(batch, step).sums.values()).backward()
        optimizer.step()
    own = dict(learner.named_parameters())
    state = learner.state_dict()
    assert own[DELTA].abs().max() > 0
    assert torch.equal(state["backbone.embed.token.weight"], own[table] + own[DELTA])
    again, _ = built(tokens, sharing="gdes", generator_size=1.0)
    again.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    # Both start from the table of a checkpoint without the generator.
    plain = {name: tensor for name, tensor in state.items() if not name.startswith("objective.")}
    fresh, _ = built(tokens, sharing="gdes", generator_size=1.0)
    fresh.load_state_dict(plain, strict=False)
    assert torch.equal(fresh.state_dict()["backbone.embed.token.weight"], plain["backbone.embed.token.weight"])
    assert not dict(fresh.named_parameters())[DELTA].any()


def test_initial_model_does_not_depend_on_sharing(tokens):
    batch = rows_of(built(tokens)[1], 8)
    with torch.no_grad():
        states = [
            built(tokens, sharing=sharing, generator_size=1.0)[0].backbone(batch.inputs)
            for sharing in ("tied", "gdes", "none")
        ]
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    apart, _ = built(tokens, sharing="none", generator_size=1.0)
    assert not set(map(id, apart.backbone.parameters())) & set(map(id, apart.generator.parameters()))


def test_gdes_with_other_width_or_two_stages_is_refused(tokens):
    with pytest.raises(UserError, match="width 8"):
        built(tokens, sharing="gdes", generator_size=0.25)
    with pytest.raises(ValueError, match="two_stage"):
        RtdConfig(sharing="gdes", training="two_stage")
