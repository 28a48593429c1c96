"""The workers of `make bench` and `make gpu`, with tiny sizes and in this process: both sides of every table run,
read the same examples, and compute the same step."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

TINY = {
    "vocab_size": 600, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48, "max_positions": 384,
    "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all tables share one corpus."""
    return tmp_path_factory.mktemp("peers")


@pytest.fixture
def prepared(script, folder):
    """A function that returns a table by name, its settings at a tiny size, and the folder of its examples."""

    def prepare(name):
        works = script("timing.works")
        work = next(work for work in works.WORKS if work.name == name)
        settings = {**works.settings_of(), **work.settings}
        settings |= {"threads": 1, "model": TINY, "max_length": 32, "batch": 4, "corpus_bytes": 150_000, "rows": 240}
        if settings["use"] is not None:
            settings |= {"rows": 60, "model": {**TINY, "max_positions": 512}}
        if settings["task"] is not None:
            lengths = {**settings["task"]["lengths"], "smallest": 24, "median": 40, "largest": 64}
            settings["task"] = {**settings["task"], "max_length": 64, "lengths": lengths}
        if settings["use"] is not None:
            if not (folder / name / "items.json").exists():
                assert script("timing.uses").prepare(folder / name, settings)["gflops"]["fp32"] > 0
        elif not (folder / name / "examples.npz").exists():
            metadata = script("timing.examples").prepare(folder / name, settings)
            assert metadata["gflops"]["bf16"] > 0 and ("task: " in metadata["text"]) == (settings["task"] is not None)
        return work, settings, folder / name

    return prepare


def answers_of(script, variant, folder, settings):
    """The answers of a worker to two turns."""
    answers, options = io.StringIO(), dict(variant.options)
    turns = [{"steps": 2, "options": options}, {"steps": 1, "count": True, "options": options}]
    commands = io.StringIO("".join(f"{json.dumps(turn)}\n" for turn in turns))
    gate = script("timing.gate").Gate(commands, answers, "cpu")
    script("timing.worker").side_of(variant.name)(folder, {**settings, "variant": dict(variant.options)}, gate)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


NAMES = ("masked_lm", "causal_lm", "sst2", "squad", "prediction")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lmtool_side_of_every_table_runs(name, script, prepared):
    work, settings, folder = prepared(name)
    for variant in work.own:
        ready, first, second = answers_of(script, variant, folder, settings)
        assert (first["steps"], second["steps"]) == (2, 1) and first["tokens"] > 0 and first["seconds"] > 0
        assert first["tokens"] == first["slots"] and first.get("graphs") == 0
        if name != "prediction":
            assert ready["flops_per_token"] > 6 * 2 * 4 * 32 * 32


@pytest.mark.slow
@pytest.mark.parametrize("name", (*NAMES, "mnli"))
def test_every_rival_runs_on_the_claimed_examples(name, script, prepared):
    pytest.importorskip("accelerate")
    work, settings, folder = prepared(name)
    rows = {variant.name: answers_of(script, variant, folder, settings)[1] for variant in work.variants}
    for comparison in work.comparisons:
        ours, theirs = rows[comparison.own], rows[comparison.rival]
        assert theirs["tokens"] <= theirs["slots"] and theirs["examples"] > 0
        if comparison.same:
            assert (theirs["tokens"], theirs["examples"]) == (ours["tokens"], ours["examples"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squad", "masked_lm", "causal_lm", "sst2"])
def test_both_sides_compute_the_same_step(name, script, prepared):
    pytest.importorskip("accelerate")
    work, settings, folder = prepared(name)
    claims = [comparison for comparison in work.comparisons if comparison.same]
    pairs = [[dict(work.variant(side).options) for side in (claim.own, claim.rival)] for claim in claims]
    answer = script("timing.check").check(folder, {**settings, "pairs": pairs})
    assert len(answer["steps"]) == len(claims)
    for step in answer["steps"]:
        assert script("timing.report").check_line(step).startswith("the same step")


USES = ("generate", "embed", "shots")


@pytest.fixture
def small_use(script, prepared, monkeypatch):
    """A function that returns a table of a trained model, its settings and its folder, with few and short texts."""

    def prepare(name):
        if name == "embed":
            pytest.importorskip("sentence_transformers")
        monkeypatch.setitem(script("timing.gate").PRODUCT_SIZE, "cpu", 16)
        work, settings, folder = prepared(name)
        variants = tuple(
            dataclasses.replace(
                variant, options={**variant.options, "at_once": min(4, variant.options["at_once"]), "new": 8}
            )
            for variant in work.variants
        )
        return dataclasses.replace(work, variants=variants), settings, folder

    return prepare


@pytest.mark.parametrize("name", USES)
def test_both_sides_of_a_use_give_the_same_results(name, script, small_use):
    work, settings, folder = small_use(name)
    claims = [comparison for comparison in work.comparisons if comparison.same]
    pairs = [[dict(work.variant(side).options) for side in (claim.own, claim.rival)] for claim in claims]
    answer = script("timing.uses").check(folder, {**settings, "pairs": pairs})
    assert len(answer["steps"]) == len(claims)
    for row in answer["steps"]:
        assert script("timing.report").check_line(row).startswith("the same ") and row["count"] >= 8


@pytest.mark.parametrize("name", USES)
def test_both_sides_of_a_use_answer_each_turn_with_its_options(name, script, small_use):
    work, settings, folder = small_use(name)
    for comparison in work.comparisons:
        (ready, *ours), (_, *theirs) = (
            answers_of(script, work.variant(side), folder, settings) for side in (comparison.own, comparison.rival)
        )
        assert ready["ready"] == name
        for own, rival in zip(ours, theirs, strict=True):
            assert own["tokens"] == own["slots"] <= rival["slots"] and own["seconds"] > 0
            assert own[work.unit] == rival[work.unit] > 0 and own["tokens"] == rival["tokens"]
            assert own["examples"] == own["steps"] * work.variant(comparison.own).options["at_once"]


def test_generated_texts_of_a_use_differ(script, small_use):
    """Equal tokens would show little if every prompt had the same continuation."""
    _, settings, folder = small_use("generate")
    items = script("timing.peers").read_items(folder)
    generate = script("timing.uses").generation(folder, settings)
    for family in settings["texts"]:
        prompts = items[family][:9]
        assert [len(item["prompt"]) for item in prompts] == list(range(8, 17))
        texts, _ = generate(prompts, {"texts": family, "new": 12})
        assert len(set(map(tuple, texts))) > 4


@pytest.mark.slow
def test_comparison_of_different_models_is_refused(script, prepared):
    pytest.importorskip("accelerate")
    import torch

    work, settings, folder = prepared("squad")
    witness = script("timing.check").Witness(settings)
    witness.tensors = {"other": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="not the same model"):
        witness.give_weights(script("timing.trainer").trainer_model({**settings, "variant": {}}, "extractive_qa"))


def test_products_worker_reports_its_flops(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script("timing.gate").PRODUCT_SIZE, "cpu", 16)
    variant = script("timing.turns").MULTIPLY
    _, first, _ = answers_of(script, variant, tmp_path, {"precision": "fp32", "device": "cpu"})
    assert first["flops"] == 2 * 2 * 16**3


@pytest.mark.slow
def test_reported_flops_match_formula(script, prepared):
    """6 L (4d^2 + 2df) for the layers, 12 L d S for attention (half if causal), and 6 (V d) for the head at predicted
    positions; lmtool counts the token shared by adjacent rows once."""
    work, settings, folder = prepared("causal_lm")
    joined = work.variant("lmtool_joined")
    ready = answers_of(script, joined, folder, settings)[0]
    size, length = settings["model"], settings["max_length"]
    d, layers = size["hidden_size"], size["num_layers"]
    body = 6 * layers * (4 * d * d + 2 * d * size["feedforward_size"])
    head = 6 * size["vocab_size"] * d * (length - 1) / length
    assert ready["flops_per_token"] == pytest.approx(body + 6 * layers * d * length + head, rel=2e-2)
