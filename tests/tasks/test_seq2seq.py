"""Sequence-to-sequence tasks: losses, generation, scores, baselines and scheduled sampling."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from task_fixtures import SIZES, TEXTS, evaluation, examples_of, table, task_config

from lmtool.config.registry import build
from lmtool.data.examples import Rows
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.models.configs import GptConfig
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config
from lmtool.models.pretransformer_configs import LstmConfig, RnnAttentionConfig
from lmtool.tasks.configs.texts import ScheduledSamplingConfig
from lmtool.tasks.files import hub_table
from lmtool.tasks.kinds.seq2seq import merge_by_source
from lmtool.tasks.kinds.text_learner import truth_probability
from lmtool.tasks.loading import decode_tables, load_task
from lmtool.tokenizers.configs import ByteBpeConfig
from lmtool.types import Packed

NO_DROPOUT = {**SIZES, "dropout": 0.0}
FAMILIES = {
    "t5": (T5Config(**NO_DROPOUT, head_size=8), "gpt2"),
    "bart": (BartConfig(**NO_DROPOUT, activation_dropout=0.0), "roberta"),
    "gpt": (GptConfig(**NO_DROPOUT), "gpt2"),
}
RECURRENT = {
    "lstm": (LstmConfig(vocab_size=300, embedding_size=12, hidden_size=16, max_positions=64, dropout=0.0), "gpt2"),
    "rnn_attention": (
        RnnAttentionConfig(vocab_size=300, embedding_size=12, hidden_size=16, attention_size=8, output_size=10), "gpt2"
    ),
}  # fmt: skip
PAIRS = [(f"say {word}", f"{word} {word}") for word in ("dull", "film", "warm", "story", "waste", "time")]
PLAIN = {"metrics": ["exact_match"], "metric": "exact_match", "target_tokens": 12, "generation__max_new_tokens": 10}
SHIPPED = (
    "tatoeba",
    "e2e_nlg",
    "geoquery",
    "xsum",
    "cnn_dailymail",
    "samsum",
    "wmt16_en_de",
    "conala",
    "nq_open",
    "web_questions",
    "trivia_qa",
    "dailydialog",
)


class HubRows(dict):
    """A split of a hub data set."""

    column_names, features = ("question", "answer"), MappingProxyType({})

    def __len__(self):
        return len(self["question"])


def learner_of(family, **fields):
    config, special_tokens = (FAMILIES | RECURRENT)[family]
    tokenizer = build(ByteBpeConfig(minimum_count=1, special_tokens=special_tokens), TEXTS * 3, 290)
    return build(task_config("seq2seq", **{**PLAIN, **fields})).learner(build(config, 0), tokenizer, 0)


def rows_of(pairs=PAIRS):
    sources, targets = zip(*pairs, strict=True)
    origin = [("rows", number + 1) for number in range(len(pairs))]
    labels = [target if isinstance(target, tuple) else (target,) for target in targets]
    return Rows(list(range(len(pairs))), {"source": list(sources)}, labels, origin)


def batch_of(learner, rows, max_length=48):
    examples = examples_of(learner, rows, max_length)
    return next(iter(PackedLoader(examples, 0, len(rows), None, shuffle=False).epoch_batches()))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_matches_unbatched_reference(family):
    """Reference: the loss of target and eos given the source, text by text."""
    learner = learner_of(family, prefix="ask: ").eval()
    tokenizer, backbone = learner.tokenizer, learner.backbone
    eos = tokenizer.role("eos")
    total = count = 0.0
    for source, target in PAIRS[:3]:
        read, written = (tokenizer.encode(text).tolist() for text in (f"ask: {source}", target))
        if family == "gpt":
            ids, labels = [*read, eos, *written], [*written, eos]
            hidden = backbone(Packed(torch.tensor(ids), (len(ids),)))[len(read) :]
        else:
            first = [tokenizer.role("cls")] if family == "bart" else []
            read, labels = [*first, *read, eos], [*first, *written, eos]
            start = tokenizer.role(backbone.config.start_role)
            outputs = Packed(torch.tensor([start, *labels[:-1]]), (len(labels),))
            hidden = backbone(Packed(torch.tensor(read), (len(read),)), None, outputs)
        logits = learner.heads["lm"](hidden, backbone.embed.token.weight)
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum"))
        count += len(labels)
    batch = batch_of(learner, rows_of(PAIRS[:3]))
    assert learner.counts(batch) == {"seq2seq": count}
    assert float(learner(batch, 1).sums["seq2seq"]) == pytest.approx(total, abs=1e-3)
    assert float(learner.score(batch)["seq2seq"].losses.sum()) == pytest.approx(total, abs=1e-3)


@torch.no_grad()
def test_prefix_mask_covers_source():
    plain, prefix = learner_of("gpt").eval(), learner_of("gpt", mask="prefix").eval()
    batches = [batch_of(learner, rows_of()) for learner in (plain, prefix)]
    lengths = [len(plain.tokenizer.encode(source)) + 1 for source, _ in PAIRS]
    order = batches[1].rows.tolist()
    assert batches[0].inputs.prefixes == ()
    assert batches[1].inputs.prefixes == tuple(lengths[row] for row in order)
    assert float(plain(batches[0], 1).sums["seq2seq"]) != float(prefix(batches[1], 1).sums["seq2seq"])


@pytest.mark.parametrize("family", FAMILIES)
def test_seq2seq_learns_and_generates_pairs(family):
    learner = learner_of(family, mask="prefix" if family == "gpt" else "causal")
    rows = rows_of()
    batch = batch_of(learner, rows)
    optimizer = torch.optim.Adam(learner.parameters(), 1e-2)
    for step in range(120):
        optimizer.zero_grad()
        loss = learner(batch, step + 1).sums["seq2seq"] / learner.counts(batch)["seq2seq"]
        loss.backward()
        optimizer.step()
        if loss < 0.03:
            break
    scored = evaluation(learner, rows, max_length=48)
    assert scored.metrics()["exact_match"] == 1.0 and scored.metrics()["generated"] == len(PAIRS)
    records = list(scored.records())
    assert [(record["source"], record["gold"], record["prediction"]) for record in records] == [
        (source, target, target) for source, target in PAIRS
    ]
    unlabeled = replace(rows, labels=None)
    assert [record["prediction"] for record in evaluation(learner, unlabeled, max_length=48).records()] == [
        target for _, target in PAIRS
    ]
    writer = learner.writer()
    prompt = writer.prompt(PAIRS[0][0])
    (new,) = writer.write([prompt], learner.config.generation, 0)
    assert writer.full_text(PAIRS[0][0], prompt, new) == PAIRS[0][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_inspection_shows_target_tokens(family):
    learner = learner_of(family)
    (entry,) = learner.inspector(examples_of(learner, rows_of(PAIRS[:1]), 48), 48).describe(1)
    pieces = learner.tokenizer.pieces(learner.tokenizer.encode(PAIRS[0][1]))
    shown = [piece.replace("Ġ", "␣") for piece in pieces]
    assert len(shown) > 2 and all(piece in str(entry["targets"]["seq2seq"]) for piece in shown)


def test_rows_with_same_source_are_merged():
    rows = rows_of([("a", ("x", "y")), ("b", "z"), ("a", ("y", "w"))])
    joined = merge_by_source(rows)
    assert joined.columns == {"source": ["a", "b"]} and joined.labels == [("x", "y", "w"), ("z",)]
    learner = learner_of("t5", generate_examples=1)
    scored = evaluation(learner, rows, max_length=48)
    assert len(list(scored.records())) == 2 and scored.terms["seq2seq"].counts_E.shape == (3,)


def test_seeded_subset_is_generated_during_training():
    learner, rows = learner_of("t5", generate_examples=2), rows_of()
    examples = examples_of(learner, rows, 48)
    data = type("Data", (), {"rows": {"seq2seq": rows}, "split": "dev"})()
    chosen = []
    for selects in (True, True, False):
        scorer = learner.scorer(data, examples, {})
        scorer.selects = selects
        chosen.append(list(scorer.source_indices))
    assert chosen[0] == chosen[1] and len(chosen[0]) == 2 and chosen[2] == list(range(len(PAIRS)))


def test_baseline_is_better_of_copy_and_most_frequent():
    learner = learner_of("t5")
    train = rows_of([("a", "x"), ("b", "x"), ("c", "d")])
    data = {name: type("Data", (), {"rows": {"seq2seq": rows}})() for name, rows in (("train", train),)}
    for held_out, name, value in (
        ([("q", "x"), ("r", "x"), ("s", "s")], "most frequent target", 2 / 3),
        ([("q", "q"), ("r", "x"), ("s", "s")], "copy of the source", 2 / 3),
    ):
        other = type("Data", (), {"rows": {"seq2seq": rows_of(held_out)}})()
        baseline = learner.baseline(data["train"], other, [], {})
        assert (baseline["name"], baseline["value"]) == (name, pytest.approx(value))


def test_truncated_sources_and_targets_are_counted():
    long = " ".join(["film"] * 30)
    for family in ("t5", "gpt"):
        learner = learner_of(family)
        metadata = examples_of(learner, rows_of([(long, "x"), ("a", long), ("b", "c")]), 32).metadata()
        assert (metadata["truncated"], metadata["truncated_targets"]) == (1, 1)
        assert "1 train targets (33.3%) are truncated" in metadata["warnings"][0]
        assert metadata["longest"] <= 32 * (1 + (family == "t5"))
    with pytest.raises(UserError, match="leave no room for a source"):
        examples_of(learner_of("gpt"), rows_of(), 12)


@pytest.mark.parametrize("schedule", ["linear", "exponential", "inverse_sigmoid"])
def test_scheduled_sampling_follows_schedule(schedule):
    """The probability of the true token follows the formulas of Bengio et al. (2015)."""
    config = ScheduledSamplingConfig(schedule=schedule, steps=10.0, least=0.1)
    formula = {"linear": 1 - 3 / 10, "exponential": np.exp(-3 / 10), "inverse_sigmoid": 10 / (10 + np.exp(3 / 10))}
    assert truth_probability(config, 3) == pytest.approx(formula[schedule])
    assert truth_probability(config, 10**6) == 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_scheduled_sampling_replaces_tokens_by_predictions(family):
    learner = learner_of(family, scheduled_sampling__schedule="linear", scheduled_sampling__steps=100.0).train()
    batch = batch_of(learner, rows_of())
    side = batch.inputs if batch.outputs is None else batch.outputs
    with torch.no_grad():
        learner.eval()
        _, best = learner._lm.scores(learner.outputs(batch, 0), learner.table_VW, learner.labels(batch))
        learner.train()
    every, half = (learner._with_predictions(batch, 7, share) for share in (0.0, 0.5))
    tokens = [(new.inputs if new.outputs is None else new.outputs).tokens for new in (every, half)]
    at = batch.targets["seq2seq"].at
    ends = torch.tensor([start + length for start, length in zip(side.starts, side.lengths, strict=True)])
    read = at + 1 < ends[side.documents[at]]
    assert torch.equal(tokens[0][at[read] + 1], best[read])
    untouched = torch.ones(len(side.tokens), dtype=torch.bool)
    untouched[at[read] + 1] = False
    assert torch.equal(tokens[0][untouched], side.tokens[untouched])
    assert 0.2 < (tokens[1] != side.tokens)[at[read] + 1].float().mean() < 0.8
    learner(batch, 60).sums["seq2seq"].backward()
    assert learner.training


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_step_by_step_predictions_follow_replaced_tokens(family):
    """A replaced token is the best prediction after all earlier tokens, replaced ones included."""
    pace = {"schedule": "linear", "steps": 100.0, "predictions": "step_by_step"}
    learner = learner_of(family, **{f"scheduled_sampling__{name}": value for name, value in pace.items()}).train()
    for seed, head in enumerate(parameter for parameter in learner.parameters() if parameter.ndim > 1):
        torch.nn.init.normal_(head, 0, 0.3, generator=torch.Generator().manual_seed(seed))
    batch = batch_of(learner, rows_of([*PAIRS, ("x", "a long story of a film")]))
    at = batch.targets["seq2seq"].at
    for truth in (0.0, 0.5):
        changed = learner._with_predictions(batch, 7, truth)
        old, new = ((given.inputs if given.outputs is None else given.outputs) for given in (batch, changed))
        ends = torch.tensor([start + length for start, length in zip(old.starts, old.lengths, strict=True)])
        read = at + 1 < ends[old.documents[at]]
        with torch.no_grad():
            learner.eval()
            _, best = learner._lm.scores(learner.outputs(changed, 0), learner.table_VW, learner.labels(batch))
            learner.train()
        own, was, predicted = new.tokens[at[read] + 1], old.tokens[at[read] + 1], best[read]
        assert ((own == predicted) | (own == was)).all()
        assert torch.equal(own, predicted) if truth == 0 else (own == was).any() and (own != was).any()
        untouched = torch.ones(len(old.tokens), dtype=torch.bool)
        untouched[at[read] + 1] = False
        assert torch.equal(new.tokens[untouched], old.tokens[untouched]) and learner.training


def test_empty_targets_are_refused_with_line(tmp_path):
    (tmp_path / "train.tsv").write_text("source\ttarget\na\tb\nc\t \n")
    with pytest.raises(UserError, match=r"train.tsv:3: the column target is empty"):
        load_task(task_config("seq2seq", path=tmp_path, **PLAIN), 0, tmp_path, True)


def test_answers_of_trivia_qa_are_the_aliases_of_the_hub_rows():
    answer = {"value": "Sinclair Lewis", "aliases": ["(Harry) Sinclair Lewis", "Sinclair Lewis"]}
    columns = {"question": ["Who won?", "Who lost?"], "answer": [answer] * 2}
    table = hub_table("train", HubRows(columns))
    config = task_config("trivia_qa", metrics=["exact_match"], metric="exact_match")
    data = decode_tables(config, {"train": table, "dev": table}, {}, 0, False)
    assert list(data.train.labels) == [tuple(answer["aliases"])] * 2
    assert data.train.columns == {"question": columns["question"]}


DIALOGUES = [[" Hello . ", "Hi !", "", "How are you ?", "Fine ."], ["Alone ."], ["A question ?", "An answer ."], []]


def test_dialogues_become_rows_of_replies(tmp_path):
    """The columns of the hub; the source of a reply is at most the two utterances before it."""
    columns = {"dialog": DIALOGUES, "act": [[1] * len(dialogue) for dialogue in DIALOGUES]}
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
    )
    config = task_config("dailydialog", path=tmp_path, metrics=["exact_match"], metric="exact_match", turns=2)
    data = load_task(config, 0, tmp_path, True)
    rows = [
        ("Hello .", "Hi !"), ("Hello .\nHi !", "How are you ?"), ("Hi !\nHow are you ?", "Fine ."),
        ("A question ?", "An answer ."),
    ]  # fmt: skip
    splits = [data.train, *data.validation.values()]
    read = [list(zip(part.columns["dialog"], (reply for (reply,) in part.labels), strict=True)) for part in splits]
    assert sorted(map(len, read)) == [1, 3], "replies of a dialogue are held out together"
    assert sorted(sum(read, [])) == sorted(rows)
    assert "2 dialogues of fewer than two utterances left out, without a reply" in data.metadata["warnings"]
    kind = build(config)
    again = kind.rows({"dialog": [DIALOGUES[0][:4], "Hi !"]}, [("input", 1), ("input", 2)], False)
    assert again.columns == {"dialog": ["Hi !\nHow are you ?", "Hi !"]} and again.labels is None


def test_long_dialogues_lose_their_first_tokens():
    learner = learner_of("t5", turns=3, label="reply")
    long = "a long story of a film what a waste of time"
    examples = examples_of(learner, rows_of([(long, "fine")]), 8)
    (prompt,) = examples.prompts([0])
    ids = learner.tokenizer.encode(long).tolist()
    assert prompt[:-1] == ids[-7:] and len(ids) > 7 and examples.metadata()["truncated"] == 1
    batch = examples.batch(examples.plan(0).rows, np.arange(1), 0)
    assert batch.inputs.tokens.tolist() == prompt


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"dialog": "a text"}] * 2, r"train.jsonl:1: the column dialog holds no list"),
        ([{"dialog": ["a", 3]}] * 2, r"train.jsonl:1: the column dialog holds no list"),
        (
            [{"dialog": ["a", "b"], "reply": "c"}] * 2,
            "makes the column reply of the dialogues' replies",
        ),
    ],
)
def test_other_columns_than_dialogues_are_refused(rows, message, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=message):
        load_task(task_config("dailydialog", path=tmp_path), 0, tmp_path, True)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tasks_train_on_tiny_files(name, tmp_path):
    """Files in the layout of the task's source."""
    config = task_config(name, path=tmp_path, metrics=["exact_match"], metric="exact_match")
    columns = [config.text[0], config.label]
    rows = [("name[Blue Spice]", "a warm film"), ("what a story", "the end")] * 3
    if name in ("nq_open", "web_questions", "trivia_qa"):
        lines = [json.dumps(dict(zip(columns, (source, [target]), strict=True))) for source, target in rows]
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
    elif config.turns is not None:
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({config.text[0]: list(row)}) for row in rows))
    else:
        table(tmp_path / "train.tsv", None if config.header else columns, rows)
    data = load_task(config, 0, tmp_path, True)
    tokenizer = build(ByteBpeConfig(minimum_count=1, special_tokens="gpt2"), TEXTS * 3, 290)
    learner = data.config.learner(build(FAMILIES["t5"][0], 0), tokenizer, 0)
    batch = next(iter(PackedLoader(examples_of(learner, data.train, 32), 0, 2, None).epoch_batches()))
    learner(batch, 1).sums[name].backward()
    assert learner.backbone.embed.token.weight.grad.abs().sum() > 0
