"""Soft prompts, prefixes and P-tuning on every architecture and task kind: trainable parameters, initialization,
warnings and refusals, and folding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lmtool.config.registry import build, lookup
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.errors import ConfigError
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.resolver.decoding import decode_config
from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig
from lmtool.tuning.configs.methods import PrefixConfig, PTuningConfig, SoftPromptConfig

SIZES = {
    "vocab_size": 340, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "max_positions": 64,
}  # fmt: skip
FAMILIES = {
    "bert": (BertConfig(**SIZES), "bert"),
    "albert": (AlbertConfig(**SIZES, embedding_size=8), "bert"),
    "gpt": (GptConfig(**SIZES), "gpt2"),
    "t5": (T5Config(**SIZES, head_size=6), "gpt2"),
    "bart": (BartConfig(**SIZES), "roberta"),
}
METHODS = {
    "prompt": SoftPromptConfig(length=3),
    "prefix": PrefixConfig(length=3, inner_size=5),
    "lstm": PTuningConfig(length=3),
    "mlp": PTuningConfig(length=3, encoder="mlp"),
    "deep": PTuningConfig(length=3, deep=True),
}
TEXTS = ["a fine and warm film", "what a lovely story", "a dull, cold mess", "this is a waste of time", "the end"]
CONTEXT = "Nobody knows why a fine film is warm, and what a lovely story the end of it tells."
# Columns, labels, and fields of the task.
KINDS = {
    "classification": ({"text": TEXTS}, [0, 1] * 2 + [0], {"labels": ["no", "yes"]}),
    "regression": ({"text": TEXTS}, [0.5, 1.5, 2.5, 0.0, 1.0], {}),
    "multi_label": ({"text": TEXTS}, [["no"], ["no", "yes"], [], ["yes"], ["no"]], {"labels": ["no", "yes"]}),
    "token_classification": (
        {"tokens": [text.split() for text in TEXTS]},
        [["O" if len(word) % 2 else "B-X" for word in text.split()] for text in TEXTS],
        {"labels": ["O", "B-X"], "text": ["tokens"], "label": "tags"},
    ),
    "span_classification": (
        {"text": TEXTS, "span": [[2, 6]] * 5}, [0, 1] * 2 + [0], {"labels": ["no", "yes"]},
    ),
    "multiple_choice": ({"text": TEXTS, "choice1": TEXTS[::-1], "choice2": ["a dog"] * 5}, [0, 1] * 2 + [0], {}),
    "extractive_qa": (
        {"question": TEXTS, "context": [CONTEXT] * 5},
        [{"text": [word], "answer_start": [CONTEXT.index(word)]} for word in ("film", "warm", "why", "story", "end")],
        {"question_tokens": 8, "stride": 8},
    ),
    "seq2seq": ({"source": TEXTS}, [text[:9] for text in TEXTS], {"target_tokens": 8, "label": "target"}),
}  # fmt: skip
METRICS = {"seq2seq": "exact_match", "regression": "pearson", "extractive_qa": "f1", "multi_label": "micro_f1"}
PAIRS = [
    *(("bert", kind) for kind in ("classification", "token_classification")), ("albert", "classification"),
    ("gpt", "classification"), ("gpt", "seq2seq"), ("t5", "seq2seq"), ("t5", "token_classification"),
    ("bart", "classification"), ("bart", "seq2seq"),
]  # fmt: skip


def tokenizer_of(special_tokens):
    if special_tokens == "bert":
        return build(WordPieceConfig(minimum_count=1), TEXTS * 3, 300)
    return build(ByteBpeConfig(minimum_count=1, special_tokens=special_tokens), TEXTS * 3, 330)


def task_of(kind, **fields):
    config, metric = lookup("task", kind).config, METRICS.get(kind, "accuracy")
    given = {"kind": kind, "name": kind, "metrics": [metric], "metric": metric, **KINDS[kind][2], **fields}
    return config.model_validate_json(json.dumps(given))


def learner_of(family, kind="classification", method=None, **fields):
    """A learner of a tiny model; with a method, its pretrained parts are frozen."""
    config, special_tokens = FAMILIES[family]
    learner = task_of(kind, **fields).learner(build(config, 0), tokenizer_of(special_tokens), 0)
    if method is not None:
        learner.tune(build(method), {f"heads.{kind}", "heads.pooler"})
    return learner


def data_of(kind):
    task, (columns, labels, _) = task_of(kind), KINDS[kind]
    origin = [("rows", number + 1) for number in range(5)]
    rows = build(task).rows({**columns, task.label: labels}, origin, labeled=True)
    return SplitData("train", rows={kind: rows})


def batches_of(learner, kind, size=5):
    examples = learner.examples(data_of(kind), 40)
    return list(PackedLoader(examples, 0, size, None, shuffle=False).epoch_batches())


def gradients(learner, kind, size):
    learner.zero_grad()
    for batch in batches_of(learner, kind, size):
        sum(learner(batch, 1).sums.values()).backward()
    return {name: tensor.grad for name, tensor in learner.named_parameters() if tensor.requires_grad}


CASES = [(family, kind, method) for family, kind in PAIRS for method in METHODS]
CASES += [("bert", kind, method) for kind in KINDS if ("bert", kind) not in PAIRS for method in ("prompt", "prefix")]
CASES += [("gpt", "extractive_qa", "lstm"), ("bart", "extractive_qa", "deep")]


@pytest.mark.parametrize(("family", "kind", "method"), [case for case in CASES if case[:2] != ("bert", "seq2seq")])
def test_only_prompts_train_and_batching_keeps_gradients(family, kind, method):
    learner = learner_of(family, kind, METHODS[method])
    frozen = [name for name, tensor in learner.named_parameters() if not tensor.requires_grad]
    assert {name for name in frozen if name.startswith("backbone.")} == {
        name for name, _ in learner_of(family, kind).named_parameters() if name.startswith("backbone.")
    }
    together, alone = (gradients(learner, kind, size) for size in (5, 1))
    for name, gradient in together.items():
        if (family, kind) == ("t5", "token_classification") and name.startswith("backbone.decoder."):
            assert gradient is None, "T5 tags words with its encoder"
            continue
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(alone[name], gradient, rtol=1e-4, atol=1e-6)
    heads = {name for name in together if name.startswith("heads.")}
    assert set(together) == learner.added_names | heads and bool(heads) == (kind != "seq2seq")
    assert all(tensor.grad is None for name, tensor in learner.named_parameters() if name in frozen)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("prompt", "deep")])
@pytest.mark.parametrize(("family", "kind"), [("albert", "classification"), ("gpt", "seq2seq"), ("bart", "seq2seq")])
def test_folded_prompts_keep_outputs(family, kind, method):
    learner = learner_of(family, kind, METHODS[method]).eval()
    (batch,) = batches_of(learner, kind)
    with torch.no_grad():
        wanted = learner.outputs(batch, 0)
        before = learner.added_names
        config = learner.tuning.fold(learner)
        torch.testing.assert_close(learner.outputs(batch, 0), wanted, rtol=0, atol=1e-6)
        again = learner_of(family, kind, config).eval()
        again.load_state_dict(learner.state_dict())
        assert torch.equal(again.outputs(batch, 0), learner.outputs(batch, 0))
    assert learner.added_names == again.added_names and len(learner.added_names) < len(before)
    assert learner.added_names <= {name for name, _ in learner.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_vocabulary_init_samples_token_vectors(family):
    learner = learner_of(family, method=SoftPromptConfig(length=400))
    tokenizer, embed = learner.tokenizer, learner.backbone.embed
    vectors = embed.virtual.weight.detach()
    matches = (vectors[:, None] == embed.token.weight[None]).all(-1).float()
    assert (matches.sum(1) == 1).all()
    drawn = matches.argmax(1).tolist()
    pieces, entries = tokenizer.pieces(drawn), len(set(drawn))
    assert not set(drawn) & tokenizer.special_ids and not any(piece.startswith("[") for piece in pieces if piece[1:])
    assert drawn[:entries] != sorted(drawn[:entries]) and drawn[entries:] == drawn[: 400 - entries]
    assert drawn == (learner_of(family, method=SoftPromptConfig(length=400)).backbone.embed.virtual.weight[:, None]
                     == embed.token.weight[None]).all(-1).float().argmax(1).tolist()  # fmt: skip


def test_class_labels_init_averages_label_tokens():
    learner = learner_of("bert", method=SoftPromptConfig(length=3, init="class_labels"), labels=["a_film", "mess"])
    embed, encode = learner.backbone.embed, learner.tokenizer.encode
    for row, words in enumerate(("a film", "mess")):
        ids = torch.from_numpy(np.asarray(encode(words))).long()
        torch.testing.assert_close(embed.virtual.weight[row], embed.token.weight[ids].mean(0))
    assert (embed.virtual.weight[2] == embed.token.weight).all(-1).any()
    drawn = learner_of("bert", method=SoftPromptConfig(length=50, init="random")).backbone.embed.virtual.weight
    assert drawn.abs().max() <= 0.5 and drawn.std() > 0.25


def test_prompt_follows_first_token_of_encoder():
    """The state of an encoder's first token represents the text, so that token keeps its position."""
    for family, after in (("bert", 1), ("albert", 1), ("gpt", 0), ("t5", 0), ("bart", 0)):
        for method in ("prompt", "lstm"):
            assert learner_of(family, method=METHODS[method]).backbone.embed.virtual.after == after


def test_prompts_and_heads_have_separate_learning_rates():
    learner = learner_of("bert", method=SoftPromptConfig(length=3))
    groups = {group.name: group for group in learner.parameter_groups()}
    assert [name for name, _ in groups["prompt"].parameters] == ["backbone.embed.virtual.weight"]
    # BERT's token vectors start with a standard deviation of 0.02, truncated at two deviations; T5's with 1.
    assert groups["prompt"].learning_rate_scale == pytest.approx(0.0176, rel=0.02)
    assert groups["decay"].learning_rate_scale == 0.01
    (prompt,) = learner_of("t5", "seq2seq", METHODS["prompt"]).parameter_groups()
    assert prompt.name == "prompt" and prompt.learning_rate_scale == pytest.approx(1.0, rel=0.02)
    learned = [name for group in groups.values() for name, _ in group.parameters]
    assert sorted(learned) == sorted(name for name, tensor in learner.named_parameters() if tensor.requires_grad)


def decode_finetuning(**sections):
    """The decoded configuration of finetuning a model with 64 learned positions."""
    metrics = {"metrics": ["accuracy"], "metric": "accuracy"}
    given = {
        "task": {"kind": "classification", "name": "mine", "path": "rows", **metrics},
        "model": {"name": "bert", **SIZES}, "tokenizer": "auto", "checkpoint": "none", "optimizer": "auto",
        "schedule": "auto", "max_steps": 1, "batch_examples": 2, "max_length": None, "tuning": {"name": "prompt"},
    }  # fmt: skip
    return decode_config("finetune", {**given, **sections})


def test_auto_settings_follow_tuning_method():
    config = decode_finetuning(tuning={"name": "prompt", "length": 20})
    assert (config.optimizer.name, config.optimizer.lr, config.schedule.name) == ("adafactor", 0.3, "constant")
    assert not config.optimizer.scale_parameter and not config.tuning.warnings(config.optimizer, config.model)
    assert config.max_length == 64 - 20, "a null max_length leaves room for the prompt"
    assert decode_finetuning(tuning={"name": "prefix"}).max_length == 54
    rates = [decode_finetuning(tuning={"name": "ptuning", "deep": deep}).optimizer.lr for deep in (False, True)]
    assert rates == [1e-3, 5e-3]
    slow = decode_finetuning(tuning={"name": "prompt", "length": 20}, optimizer={"name": "adamw", "lr": 5e-5})
    assert (
        "optimizer.lr=5e-05: soft prompts hardly change below 0.01"
        in slow.tuning.warnings(slow.optimizer, slow.model)[0]
    )
    assert (
        decode_finetuning(tuning={"name": "prefix"}, optimizer={"name": "adamw", "lr": 5e-5}).tuning.warnings(
            None, None
        )
        == []
    )


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        (
            {"tuning": {"name": "prompt", "length": 20}, "max_length": 64},
            "max_length=64 and the 20 virtual tokens of tuning=prompt are more than model.max_positions=64",
            "set max_length=44",
        ),
        ({"tuning": {"name": "prefix"}, "max_length": 55}, "the 10 virtual tokens", "set max_length=54"),
        (
            {"tuning": {"name": "ptuning", "length": 60}, "max_length": 40},
            "60 virtual tokens", "set tuning.length=24",
        ),
        (
            {"tuning": {"name": "prompt", "length": 8, "init": "class_labels"}, "task": {
                "kind": "regression", "name": "mine", "path": "rows", "metrics": ["pearson"], "metric": "pearson"}},
            "tuning.init=class_labels: task.kind=regression has no labels", "set tuning.init=vocabulary",
        ),
        ({"tuning": {"name": "ptuning", "deep": True, "encoder": "mlp"}}, "tuning.deep=true uses no encoder", None),
    ],
)  # fmt: skip
def test_incompatible_settings_are_refused(sections, message, hint):
    with pytest.raises(ConfigError) as caught:
        decode_finetuning(**sections)
    (problem,) = caught.value.problems
    assert message in problem.message and (hint is None or problem.hint == hint)


def test_relative_positions_keep_max_length():
    config = decode_finetuning(
        model={"name": "t5", **SIZES, "head_size": 8}, tuning={"name": "prompt", "length": 60}, max_length=64
    )
    assert config.max_length == 64


def test_target_capacity_leaves_room_for_prefix():
    rooms = [
        learner_of("bart", "seq2seq", method, target_tokens=64).examples(data_of("seq2seq"), 40).target_capacity
        for method in (METHODS["prompt"], METHODS["prefix"])
    ]
    assert rooms[0] - rooms[1] == 3
