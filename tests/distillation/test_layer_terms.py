"""Terms between layers: against a loop over the equations, and zero in every family where student equals teacher."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import Several, build
from lmtool.distillation.configs.base import ModelPair
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.recording import Teacher, record
from lmtool.distillation.standard import Standard
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import combine
from lmtool.models.configs import BertConfig, ModelConfig
from lmtool.nn.prefix import VirtualTokens
from lmtool.nn.stack import Tap, TapPoint
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed, StepOutput, Target
from tests.breadth import slow_but
from tests.models.test_read import ATTENDING, LENGTHS, SIZES, config_of

TERMS = ("states", "hidden", "patience", "embeddings", "attention", "relations")
FP32 = Precision("fp32", torch.device("cpu"), "")


class Reader(BaseLearner):
    """A learner that computes hidden states and predicts nothing."""

    loss_weights = {"nothing": 1.0}  # noqa: RUF012

    def counts(self, batch):
        return {"nothing": 1.0}

    def forward(self, batch, step):
        hidden_TH = self.hidden_of(batch, self.dropout_rng(batch, step))
        return StepOutput({"nothing": hidden_TH.sum() * 0.0}, self.loss_weights)

    def hidden_of(self, batch, rng):
        return self.hidden(batch.inputs, batch.outputs, rng)

    examples = score = predictors = None


def learner(family="bert", seed=0, **fields):
    plain = config_of(family)
    rates = {name: 0.0 for name in type(plain).model_fields if name.endswith("dropout")}
    config = config_of(family, **rates | {"initializer_std": 1.0 if family == "t5" else 0.3} | fields)
    return Reader(type(config), build(config, seed), None, 0)


def batch_of(student, lengths=LENGTHS):
    tokens = torch.randint(0, 40, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    inputs = Packed(tokens, lengths, {"segment": torch.zeros_like(tokens)})
    outputs = Packed(tokens.flip(0), lengths[::-1]) if "outputs" in student.backbone.config.depths else None
    numbers = torch.arange(len(lengths))
    return Batch(inputs, {"nothing": Target(None)}, numbers, numbers * 0, outputs=outputs)


def distilled(student, teacher, terms, **fields):
    sections = {name: section if isinstance(section, dict) else {} for name, section in terms.items()}
    config = StandardConfig(teacher="t", gold=0.0, terms=Several("distill/term").validate(sections), **fields)
    frozen = teacher.requires_grad_(False).eval()
    return Standard(config, student, [Teacher(frozen, FP32, "t")])


def losses(mode, batch):
    """The mean of each term, and the largest gradient of the student from it."""
    counts, result = mode.counts(batch), {}
    for name in mode.distill:
        mode.zero_grad()
        mean = mode(batch, 1).sums[name] / counts[name]
        mean.backward()
        gradients = [parameter.grad for parameter in mode.student.parameters() if parameter.grad is not None]
        result[name] = mean.item(), max(gradient.abs().max().item() for gradient in gradients)
    return result


@pytest.mark.parametrize("family", slow_but({"bert", "gpt", "t5", "deberta", "bigbird"}, ATTENDING))
def test_losses_are_zero_only_for_a_student_equal_to_the_teacher(family):
    student, same, other = learner(family), learner(family), learner(family, seed=1)
    batch = batch_of(student)
    for name, (loss, gradient) in losses(distilled(student, same, dict.fromkeys(TERMS)), batch).items():
        assert abs(loss) < 1e-6 and gradient < 1e-5, name
    for name, (loss, gradient) in losses(distilled(student, other, dict.fromkeys(TERMS)), batch).items():
        assert loss > 1e-4 and gradient > 1e-4, name


def single_documents(model, lengths):
    """Each document of the batch, packed by itself."""
    whole, start = batch_of(model, lengths).inputs, 0
    for length in lengths:
        if length:
            tokens = whole.tokens[start : start + length]
            yield Packed(tokens, (length,), {"segment": torch.zeros_like(tokens)})
        start += length


def test_losses_match_the_equations_of_the_papers():
    """A loop over texts, layers and heads follows the equations."""
    student, teacher = learner(num_layers=1), learner(seed=1, num_layers=2)
    mode = distilled(student, teacher, dict.fromkeys(TERMS))
    found = {name: loss for name, (loss, _) in losses(mode, batch_of(student)).items()}
    expected, tokens = dict.fromkeys(TERMS, 0.0), sum(LENGTHS)
    with torch.no_grad():
        for own, its in zip(single_documents(student, LENGTHS), single_documents(teacher, LENGTHS), strict=True):
            x, y = student.backbone(own), teacher.backbone(its)
            expected["states"] += (1 - F.cosine_similarity(x, y)).sum() / tokens
            expected["hidden"] += F.mse_loss(x, y) * len(x) / tokens
            gap = x[0] / x[0].norm() - y[0] / y[0].norm()
            expected["patience"] += gap.square().mean() / len(LENGTHS)
            at = {model: model.backbone.embed.finish(model.backbone.embed.tokens(own.tokens), own, own.positions)
                  for model in (student, teacher)}  # fmt: skip
            expected["embeddings"] += F.mse_loss(at[student], at[teacher]) * len(x) / tokens
            reads = {student: at[student], teacher: states_behind_first(teacher, its)}
            parts = {}
            for model, layer in ((student, student.backbone.layers[0]), (teacher, teacher.backbone.layers[1])):
                attention = layer.self_attn
                parts[model] = [
                    attention.heads(part(reads[model])).transpose(0, 1)
                    for part in (attention.q_proj, attention.k_proj, attention.v_proj)
                ]
            scores = {model: q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 for model, (q, k, _) in parts.items()}
            values = {model: v @ v.transpose(1, 2) / v.shape[-1] ** 0.5 for model, (*_, v) in parts.items()}
            expected["attention"] += F.mse_loss(scores[student], scores[teacher]) * len(x) / tokens
            for related in (scores, values):
                logs = {model: related[model].log_softmax(-1) for model in related}
                kl = F.kl_div(logs[student], logs[teacher], reduction="none", log_target=True)
                expected["relations"] += kl.sum(-1).mean(0).sum() / tokens
    for name in TERMS:
        assert found[name] == pytest.approx(float(expected[name]), rel=1e-4), name


def states_behind_first(model, packed):
    kept = {}

    class Keep(Tap):
        def __call__(self, place, x_TH):
            kept[place] = x_TH
            return x_TH

    model.backbone(packed, tap=Keep())
    return kept[TapPoint(1)]


def test_projections_exist_only_where_widths_differ():
    wide, same = learner(hidden_size=24, num_layers=3, feedforward_size=24), learner(seed=1)
    assert not list(distilled(learner(), same, dict.fromkeys(TERMS)).distill.parameters())
    terms = ("states", "hidden", "patience", "embeddings", "relations")
    mode = distilled(learner(), wide, dict.fromkeys(terms))
    shapes = {name: tuple(parameter.shape) for name, parameter in mode.distill.named_parameters()}
    assert shapes == {f"{name}.projection.weight": (24, 16) for name in terms if name != "relations"}
    again = distilled(learner(), wide, dict.fromkeys(terms))
    for name, parameter in mode.distill.named_parameters():
        assert torch.equal(parameter, dict(again.distill.named_parameters())[name])
    assert all(loss > 0 and gradient > 0 for loss, gradient in losses(mode, batch_of(mode.student)).values())
    learned = {name for group in mode.parameter_groups() for name, _ in group.parameters if name.startswith("distill.")}
    assert learned == {f"distill.{name}" for name in shapes}


def test_relation_heads_allow_different_numbers_of_heads():
    student, teacher = learner(num_heads=4), learner(hidden_size=24, num_heads=2, feedforward_size=24)
    v2 = {"relations": ("queries", "keys", "values"), "relation_heads": 8}
    mode = distilled(student, teacher, {"relations": v2}, layers="last")
    ((loss, gradient),) = losses(mode, batch_of(student)).values()
    assert loss > 0 and gradient > 0


def test_empty_texts_and_an_unread_side_add_no_loss():
    """A side that a learner does not read adds no loss, and the mean is still over tokens."""
    student, teacher = learner("bart"), learner("bart", seed=1)
    batch = batch_of(student, (5, 0, 3))
    assert all(loss > 0 for loss, _ in losses(distilled(student, teacher, dict.fromkeys(TERMS)), batch).values())
    mode = distilled(student, teacher, {"hidden": None, "patience": None, "attention": None, "states": None})
    both = replace(batch, outputs=batch.inputs)
    for part in (student, teacher):
        part.hidden_of = lambda own, rng, read_M=None, part=part: part.hidden(own.inputs, None, rng, read_M)
    one_side, both_sides = losses(mode, batch), losses(mode, both)
    assert all(one_side[name] == pytest.approx(both_sides[name], rel=1e-5) for name in mode.distill)


@pytest.mark.parametrize(
    ("terms", "student", "teacher", "fields", "message"),
    [
        ({"attention": {}}, {"num_heads": 4}, {}, {}, "the student has 4 attention heads per layer, the teacher 2"),
        ({"relations": {}}, {"num_heads": 4}, {}, {}, "the student has 4 attention heads per layer, the teacher 2"),
        ({"attention": {}}, {}, {}, {"layers": {0: 0, 1: 1}}, "layer 0 of distill.layers is the embeddings"),
        (
            {"relations": {"relations": ["values"], "relation_heads": 5}}, {}, {"hidden_size": 24}, {},
            "the widths 16 and 24 cannot both be split into 5 relation heads",
        ),
        ({"hidden": {}}, {}, {}, {"layers": {3: 1}}, "the student has 2 layers, the teacher 2"),
    ],
)  # fmt: skip
def test_incompatible_terms_and_sizes_are_refused(terms, student, teacher, fields, message):
    config = StandardConfig(teacher="t", terms=Several("distill/term").validate(terms), **fields)
    problem = next(
        config.conflicts_of_pair(ModelPair(BertConfig(**SIZES | student), BertConfig(**SIZES | teacher))), None
    )
    assert problem is not None and message in problem.message and problem.hint


@pytest.mark.parametrize("term", TERMS)
def test_models_without_layers_or_heads_are_refused(term):
    config = StandardConfig(teacher="t", terms=Several("distill/term").validate({term: {}}))
    for pair in ((ModelConfig(name="lstm"), BertConfig()), (BertConfig(), ModelConfig(name="lstm"))):
        assert "lstm" in next(config.conflicts_of_pair(ModelPair(*pair)), None).message


def test_student_with_prefix_keys_is_refused():
    student = learner()
    student.backbone.embed.virtual = VirtualTokens(2, 16)
    with pytest.raises(UserError, match=r"distill\.terms\.attention: the tuning method adds keys"):
        distilled(student, learner(), {"attention": None})
    losses(distilled(student, learner(), {"hidden": None}), batch_of(student))


def test_losses_of_a_mixture_match_the_whole_batch():
    student, teacher = learner(), learner(seed=1)
    batch, mode = batch_of(student), distilled(student, teacher, dict.fromkeys(TERMS))
    whole = losses(mode, batch)
    at, parts = sum(LENGTHS[:2]), []
    for first, last, lengths in ((0, at, LENGTHS[:2]), (at, None, LENGTHS[2:])):
        numbers, tokens = torch.arange(len(lengths)), batch.inputs.tokens[first:last]
        parts.append(Batch(Packed(tokens, lengths), {"nothing": Target(None)}, numbers, numbers * 0))
    for part in (student, teacher):
        read = part.hidden_of
        part.hidden_of = lambda mixed, rng, read=read: torch.cat([read(own, rng) for _, own in mixed.members])
    mode.teacher = SimpleNamespace(predict=lambda batch, tap: record(teacher, batch, 0, tap, losses=False))
    mixed = losses(mode, combine([("one", parts[0]), ("other", parts[1])]))
    assert all(mixed[name] == pytest.approx(whole[name], rel=1e-4) for name in TERMS)


def test_texts_missing_from_the_teacher_batch_are_refused():
    student, teacher = learner(), learner(seed=1)
    for term in ("hidden", "attention"):
        mode, batch = distilled(student, teacher, {term: None}), batch_of(student)
        fewer = replace(batch, inputs=Packed(batch.inputs.tokens[:5], (5,)))
        mode.teacher = SimpleNamespace(
            predict=lambda batch, tap, fewer=fewer: record(teacher, fewer, 0, tap, losses=False)
        )
        with pytest.raises(UserError, match="the student reads texts that its teacher does not read"):
            mode(batch, 1)
