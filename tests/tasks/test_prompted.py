"""Prompt-based finetuning (LM-BFF): prompts, label words, demonstrations and the auxiliary MLM loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from task_fixtures import SIZES, TEXTS, evaluation, examples_of, glue, split_data, task_config

from lmtool.config.registry import build
from lmtool.data.examples import Rows, SplitData, unlabeled_name
from lmtool.data.formats import truncate_texts
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.tasks.loading import load_task
from lmtool.tasks.prompting.examples import Demonstrations
from lmtool.tasks.prompting.pattern import Pattern
from lmtool.tokenizers.configs import ByteBpeConfig, SentencePieceConfig, WordPieceConfig
from lmtool.weights.assemble import load_into
from lmtool.weights.padded_model import load
from lmtool.weights.reading import read
from tests.weights.published_folders import logits_of, make

PROMPT_TEXTS = [*TEXTS, "It was terrible.", "It was great.", "no ? yes , so maybe"] * 3
TOKENIZERS = {
    "bert": WordPieceConfig(minimum_count=1),
    "gpt": ByteBpeConfig(minimum_count=1),
    "t5": SentencePieceConfig(sentinels=4),
    "bart": ByteBpeConfig(minimum_count=1, special_tokens="roberta"),
}
NO_DROPOUT = {**SIZES, "vocab_size": 420, "dropout": 0.0}
MODELS = {
    "bert": BertConfig(**NO_DROPOUT),
    "gpt": GptConfig(**NO_DROPOUT),
    "t5": T5Config(**NO_DROPOUT, head_size=8),
    "bart": BartConfig(**NO_DROPOUT, activation_dropout=0.0),
}


@pytest.fixture(scope="module")
def tokenizers():
    sizes = {"t5": 120}
    return {name: build(config, PROMPT_TEXTS, sizes.get(name, 400)) for name, config in TOKENIZERS.items()}


def data_of(folder, name="sst2", **overrides):
    return load_task(task_config(name, path=glue(name, folder / name), head="prompt", **overrides), 0, folder, True)


def learner_of(data, tokenizers, family="bert", seed=0):
    return build(data.config).learner(build(MODELS[family], 0), tokenizers[family], seed)


def input_texts(learner, examples, count=2, epoch=0):
    """Text of the first inputs."""
    rows = examples.plan(epoch).rows[:count]
    batch = examples.batch(rows, np.arange(len(rows)), epoch)
    return [
        " ".join(learner.tokenizer.pieces(ids)).replace("Ġ", "_").replace("Ċ", "/")
        for ids in batch.inputs.tokens.split(list(batch.inputs.lengths))
    ]


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "gpt"])
def test_label_word_logits_match_transformers(family, tmp_path):
    theirs = make(family, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    template, mask = ("{sentence} It was {label}.", f" {tokenizer.mask_token}.")
    if family == "gpt":  # predicts the token after the text
        template, mask = "{sentence} It was {label}", ""
    words = ["the", "dog", "by", "sea", "a", "s", "t", "film"]
    token_ids = {word: tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words}
    negative, positive, *_ = [word for word in words if len(token_ids[word]) == 1]
    ids_C = [token_ids[negative][0], token_ids[positive][0]]

    data = data_of(tmp_path, prompt__template=template, prompt__words={"negative": negative, "positive": positive})
    loaded = load(str(tmp_path / "model"), offline=True)
    learner = build(data.config).learner(build(loaded.config, 0), loaded.tokenizer, 0)
    report = load_into(learner, read(str(tmp_path / "model"), True).tensors, "model")
    assert not report.new and not any(head.startswith("heads.sst2") for head in learner.state_dict())
    rows = data.train.take(np.arange(3))
    examples = examples_of(learner.eval(), rows, 40)
    batch = examples.batch(examples.plan(0).rows, np.arange(3), 0)
    logits_NC = learner.outputs(batch, 0)

    inputs = batch.inputs.tokens.split(list(batch.inputs.lengths))
    for sentence, tokens_T, logits_C in zip(rows.columns["sentence"], inputs, logits_NC, strict=True):
        given = tokenizer(f"{sentence} It was{mask}", return_tensors="pt")
        tokens = given["input_ids"][0].tolist()
        assert tokens == tokens_T.tolist()
        place = tokens.index(tokenizer.mask_token_id) if mask else -1
        their_logits_TV = logits_of(theirs, given["input_ids"], given["attention_mask"], None)[0]
        torch.testing.assert_close(logits_C, their_logits_TV[place, ids_C], atol=1e-4, rtol=1e-4)


def test_prompts_follow_input_format_of_model(tokenizers, tmp_path):
    data = data_of(tmp_path)
    learners = {family: learner_of(data, tokenizers, family) for family in ("bert", "gpt")}
    texts = {family: input_texts(learner, examples_of(learner, data.train))[1] for family, learner in learners.items()}
    assert texts["bert"] == "[CLS] what a lovely story [UNK] it was [MASK] . [SEP]"
    assert texts["gpt"].replace(" ", "").replace("_", " ").startswith("what a lovely story 1")
    assert texts["gpt"].endswith("_was")
    pair = data_of(tmp_path, "mnli")
    learner = learner_of(pair, tokenizers)
    text = input_texts(learner, examples_of(learner, pair.train))[0]
    assert text == "[CLS] a fine and warm film [UNK] ? [MASK] , a fine and warm film [UNK] no [SEP]"


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoder_fills_mask_with_label_word(tokenizers, family, tmp_path):
    data = data_of(tmp_path)
    learner = learner_of(data, tokenizers, family)
    examples = examples_of(learner, data.train, 60)
    gap = {"t5": "<extra_id_0>", "bart": "<mask>"}[family]
    batch = examples.batch(examples.plan(0).rows[:1], np.arange(1), 0)
    pieces = learner.tokenizer.pieces(batch.inputs.tokens)
    at = pieces.index(gap)
    assert learner.tokenizer.decode(batch.inputs.tokens[:at]).strip().endswith("It was") and pieces[-1] == "</s>"
    assert learner.tokenizer.decode(batch.inputs.tokens[at + 1 : -1]) == "."
    assert learner.tokenizer.decode(batch.targets["sst2"].labels).strip() == "great"
    kind = build(data.config)
    assert kind.parse("terrible").value == 0 and kind.parse("negative") is None
    assert len(evaluation(learner.eval(), data.validation["dev"], max_length=60).predictions) == 6


def test_truncation_keeps_prompt(tokenizers, tmp_path):
    data = data_of(tmp_path)
    learner = learner_of(data, tokenizers)
    examples = examples_of(learner, data.train, 9)
    assert input_texts(learner, examples, 1) == ["[CLS] a fine and it was [MASK] . [SEP]"]
    assert examples.metadata()["truncated"] > 0 and examples.plan(0).lengths.max() == 9
    with pytest.raises(UserError, match="leaves too little room for text: the prompt around it has 6 tokens"):
        examples_of(learner, data.train, 6)
    writer = learner_of(data, tokenizers, "bart")
    pieces = input_texts(writer, examples_of(writer, data.train, 14), 1)[0].split()
    assert len(pieces) == 14 and pieces[-3:] == ["<mask>", ".", "</s>"]
    lengths = np.random.default_rng(0).integers(0, 15, (5, 40))
    for own, cut in zip(lengths.T, truncate_texts(lengths, 33, "bert").T, strict=True):
        left = own.tolist()
        while sum(left) > 33:
            left[len(left) - 1 - left[::-1].index(max(left))] -= 1
        assert left == cut.tolist()


@pytest.mark.parametrize("family", ["bert", "gpt", "t5"])
def test_label_words_are_learned(tokenizers, family, tmp_path):
    data = data_of(tmp_path, auxiliary_mlm=0.1 if family == "bert" else 0.0)
    learner, rows = learner_of(data, tokenizers, family), data.train.take(np.arange(4))
    examples = examples_of(learner, rows, 64)
    optimizer = torch.optim.Adam(learner.parameters(), 1e-2)
    for step in range(40):
        batch = next(iter(PackedLoader(examples, 0, 4, None, shuffle=False).epoch_batches(step)))
        output, counts = learner.train()(batch, step), learner.counts(batch)
        optimizer.zero_grad()
        sum(output.loss_weights[term] * total / counts[term] for term, total in output.sums.items()).backward()
        optimizer.step()
    assert set(output.sums) == ({"sst2", "mlm"} if family == "bert" else {"sst2"})
    assert evaluation(learner.eval(), rows, max_length=64).metrics()["accuracy"] == 1.0


def test_demonstrations_are_placed_by_architecture(tokenizers, tmp_path):
    data = data_of(tmp_path, demonstrations=2)
    bert, gpt = (learner_of(data, tokenizers, family) for family in ("bert", "gpt"))
    text = input_texts(bert, examples_of(bert, data.train, 60), 1)[0]
    question, first, second, end = text.split(" [SEP]")
    assert question == "[CLS] a fine and warm film [UNK] it was [MASK] ." and not end
    assert first.endswith("it was terrible .") and second.endswith("it was great .")
    text = input_texts(gpt, examples_of(gpt, data.train, 64), 1)[0].replace(" ", "").replace("_", " ")
    first, second, question = text.split("//")
    assert first.endswith("It was terrible.") and second.endswith("It was great.")
    assert question.startswith("a fine and warm film 0") and question.endswith("It was")


def test_demonstrations_are_sampled_uniformly_per_text(tokenizers):
    rows = {"a": [(f"a{number}",) for number in range(5)], "b": [(f"b{number}",) for number in range(3)]}
    pattern = Pattern("{text} {label}", tokenizers["bert"])
    drawn = Demonstrations(rows, ["a", "b"], ["text"], pattern, 4, 7)
    own, keys = drawn.own_indices(Rows.of_texts(text=["a2"] * 4000)), np.arange(4000)
    assert own[0].tolist() == [2, 3]
    pool = drawn.sampled(own, keys, 1, 1)[:, 0]
    fractions = [np.bincount(pool[:, number], minlength=8) / 4000 for number in range(2)]
    # Uniform over the other rows of the class and all rows of the other class, within five standard errors.
    np.testing.assert_allclose(fractions[0], [0.25, 0.25, 0, 0.25, 0.25, 0, 0, 0], atol=5 * (0.25 * 0.75 / 4000) ** 0.5)
    np.testing.assert_allclose(fractions[1][5:], 1 / 3, atol=5 * (2 / 9 / 4000) ** 0.5)
    joint = np.bincount(pool[:, 0] * 8 + pool[:, 1], minlength=64)
    assert joint[joint > 0].min() > 250 and (joint > 0).sum() == 12
    again = Demonstrations(rows, ["a", "b"], ["text"], pattern, 4, 7)
    np.testing.assert_array_equal(again.sampled(own, keys, 1, 1)[:, 0], pool)
    assert (again.sampled(own, keys, 2, 1)[:, 0] != pool).any()
    other = Demonstrations(rows, ["a", "b"], ["text"], pattern, 4, 8)
    assert (other.sampled(own, keys, 1, 1)[:, 0] != pool).any()
    sets = drawn.sampled(own[:50], keys[:50], 0, 4)
    assert sets.shape == (50, 4, 2) and len(np.unique(sets[:, :, 0])) == 4
    alone = Demonstrations({"a": [("x",)], "b": [("y",)]}, ["a", "b"], ["text"], pattern, 1, 0)
    with pytest.raises(UserError, match="the class a has no other row"):
        alone.sampled(alone.own_indices(Rows.of_texts(text=["x"])), keys[:1], 1, 1)


def test_logits_are_averaged_over_demonstration_sets(tokenizers, tmp_path):
    data = data_of(tmp_path, demonstrations=3)
    learner, dev = learner_of(data, tokenizers).eval(), data.validation["dev"]
    held_out = split_data(learner, dev, "dev")
    examples = learner.examples(held_out, 60)
    assert len(examples.plan(0)) == 18 and examples.metadata()["demonstration_draws"] == 3
    batch = examples.batch(examples.plan(0).rows, np.arange(18), 0)
    with torch.no_grad():
        logits = learner.outputs(batch, 0).view(6, 3, 2).mean(1).softmax(-1)
    scored = evaluation(learner, dev, max_length=60)
    fractions = np.stack([prediction.probabilities for prediction in scored.predictions])
    np.testing.assert_allclose(fractions, logits, atol=1e-5)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            learner.outputs(batch, 0), learner.labels(batch), reduction="none"
        ).view(6, 3)
    np.testing.assert_allclose(scored.losses, losses.mean(1), atol=1e-5)
    # A text gets the same demonstrations when evaluated alone.
    alone = evaluation(learner, dev.take(np.array([4])), max_length=60).predictions[0]
    np.testing.assert_allclose(alone.probabilities, fractions[4], atol=1e-6)
    assert data.config.demonstration_rows.keys() == {"negative", "positive"}
    assert all(row[0] in data.train.columns["sentence"] for row in data.config.demonstration_rows["positive"])


def test_auxiliary_mlm_masks_unlabeled_rows(tokenizers, tmp_path):
    data = data_of(tmp_path, auxiliary_mlm=0.25)
    learner = learner_of(data, tokenizers)
    assert learner.loss_weights == {"sst2": 0.75, "mlm": 0.25}
    texts = Rows.of_texts(sentence=["nobody knows why the end isn't bad"])
    examples = learner.examples(SplitData("train", rows={"sst2": data.train, unlabeled_name("sst2"): texts}), 40)
    batch = examples.batch(examples.plan(1).rows[:3], np.arange(3), 1)
    assert batch.examples.tolist() == [0, 0, 1, 1, 2, 2] and batch.parts.tolist() == [0, 1] * 3
    target, tokens = batch.targets["mlm"], batch.inputs.tokens.clone()
    assert (batch.inputs.documents[target.at] % 2 == 1).all() and len(target.labels) >= 3
    tokens[target.at] = target.labels
    whole = learner.tokenizer.encode("nobody knows why the end isn't bad it was").tolist()
    for number in (1, 3, 5):
        start, length = batch.inputs.starts[number], batch.inputs.lengths[number]
        assert tokens[start + 1 : start + length - 3].tolist() == whole
        assert tokens[start + length - 3] == learner.tokenizer.role("mask")
    # Answer positions are only in the labeled inputs.
    assert (batch.inputs.documents[learner.answer_indices(batch)] == torch.tensor([0, 2, 4])).all()
    masked = [examples.batch(examples.plan(epoch).rows[:1], np.arange(1), epoch) for epoch in (0, 3)]
    assert not torch.equal(masked[0].inputs.tokens, masked[1].inputs.tokens)
    assert (
        "mlm"
        not in examples_of(learner, data.train, 40, "dev").batch(examples.plan(0).rows[:2], np.arange(2), 0).targets
    )
    stats = learner.inspector(examples, 40).measure(200)
    assert not stats.broken()
    assert next(learner.inspector(examples, 40).describe(1))["targets"]["sst2"] == "positive: great"


@pytest.mark.parametrize(
    ("words", "template", "message"),
    [
        ({"negative": "terrible film", "positive": "great"}, None, r"'terrible film', for negative, has 2 tokens"),
        ({"negative": "Great", "positive": "great"}, None, "is the same token as the word for negative: great"),
        ({"negative": "ß", "positive": "great"}, None, "'ß', for negative, is not in this vocabulary"),
    ],
)
def test_label_words_must_be_single_distinct_tokens(tokenizers, words, template, message, tmp_path):
    data = data_of(tmp_path, prompt__words=words)
    with pytest.raises(UserError, match=message):
        learner_of(data, tokenizers)


@pytest.mark.parametrize(
    ("name", "family", "fields", "key"),
    [
        ("sst2", "bert", {"prompt__template": "{sentense} {label}"}, "task.prompt.template"),
        ("sst2", "bert", {"prompt__template": "{label}"}, "task.prompt.template"),
        ("mnli", "gpt", {}, "task.prompt.template"),
        ("sst2", "bert", {"prompt__words": {"nice": "x"}}, "task.prompt.words"),
        ("sst2", "bert", {"prompt__words": {"negative": "great", "positive": "great"}}, "task.prompt.words"),
        ("sst2", "bert", {"pooling": "mean"}, "task.pooling"),
        ("sst2", "t5", {"loss__focal_gamma": 2.0}, "task.loss.focal_gamma"),
        ("sst2", "gpt", {"auxiliary_mlm": 0.1}, "task.auxiliary_mlm"),
        ("sst2", "t5", {"demonstrations": 2}, "task.demonstrations"),
        ("sst2", "bert", {"demonstrations": 2, "head": None}, "task.demonstrations"),
        ("stsb", "bert", {}, "task.head"),
    ],
)
def test_prompt_conflicts_are_found_before_loading(name, family, fields, key):
    problem = task_config(name, **{"head": "prompt", **fields}).first_conflict(MODELS[family])
    assert problem.key == key and problem.hint and "\n" not in problem.message
    for shipped in ("sst2", "cola", "mnli", "qnli", "mrpc", "qqp", "rte", "cb", "boolq", "wic"):
        assert task_config(shipped, head="prompt").first_conflict(MODELS["bert"]) is None


def test_checkpoint_with_prompt_keeps_prompt():
    trained = task_config("sst2", head="prompt", demonstrations=True, prompt__words={"negative": "bad"})
    assert trained.demonstrations == 16
    section = trained.model_dump(mode="json")
    form = {name: section[name] for name in trained.head_fields}
    other = task_config("sst2").with_head(form)
    assert (other.head, other.prompt, other.demonstrations) == ("prompt", trained.prompt, 16)
    assert task_config("sst2").takes_head(form, MODELS["bert"])
    assert not task_config("sst2", head="paper").takes_head(form, MODELS["bert"])
    classic = task_config("sst2").with_head({"head": "paper", "prompt": {}, "demonstrations": 0})
    assert classic.head == "paper" and classic.prompt.words
    with pytest.raises(ValueError, match="demonstration_rows: each row of positive must have the texts"):
        type(trained).model_validate({**trained.model_dump(), "demonstration_rows": {"positive": (("a", "b"),)}})
