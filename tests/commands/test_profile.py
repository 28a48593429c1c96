"""`lmtool profile`: parts add up to the step, the profiled run is the trained one, output files, and refusals."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.commands import profile as command
from lmtool.config.groups import options
from lmtool.reporting.costs import StepProfile, remarks
from lmtool.runs.run_folder import RunFolder
from tests.commands.conftest import TINY, finetune, merge_overrides, pretrain, tiny

TEXT = ["data=text", "data.path=text.txt", "cache_dir=cache", "batch_tokens=128"]
TASK = ["task=sst2", "task.path=rows", "cache_dir=cache", "batch_examples=8", "checkpoint=none", "model=bert_tiny"]
LAYERS = {"attention: projections", "attention: scores", "feed-forward", "norms, dropout, residuals"}
NO_TRANSFORMERS = ("cnn", "elmo", "lstm", "rnn_attention", "word_vectors")
EVERYWHERE = LAYERS | {"embedding", "head", "loss", "optimizer: clip", "optimizer: step", "optimizer: zeroing", "host"}


def profiled(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The table of a profile in the folder `seen`, and the printed output."""
    (model,) = [word.partition("=")[2] for word in words if word.startswith("model=")]
    assert cli.main(merge_overrides(["profile", words[0], *tiny(model), "steps=1", "output=seen", *words[1:]])) == 0
    table = json.loads(Path("seen/profile.json").read_text())
    spent = sum(row["forward"] + row["backward"] for row in table["parts"].values())
    assert spent == pytest.approx(table["milliseconds"], rel=1e-6)
    assert all(value >= 0 for row in table["parts"].values() for value in row.values())
    within = sum(row["host"] for row in table["parts"].values())
    assert 0 < within <= table["parts"]["host"]["forward"] * 1.001
    return table, capsys.readouterr().out


def test_profile_pretrain_writes_parts_and_trace(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, printed = profiled(capsys, "pretrain", "model=bert_tiny", *TEXT, "micro_batch_tokens=64", "steps=2")
    assert set(table["parts"]) >= EVERYWHERE
    assert all(table["parts"][part]["backward"] > 0 for part in LAYERS | {"embedding"})
    assert 0 < table["products_milliseconds"] < table["milliseconds"] and table["steps"] == 2
    assert table["micro_batches"] >= 2 and table["product_rate"] > 0
    assert "matrix products:" in printed and "without the profiler" in printed
    assert "attention: scores" in printed and "a micro_batch_tokens above 64" in printed
    with gzip.open("seen/trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"lmtool/step", "lmtool/attention", "lmtool/head", "aten::addmm"} <= names
    assert sorted(path.name for path in Path("seen").iterdir()) == ["profile.json", "trace.json.gz"]
    assert not Path("runs").exists(), "no run is created"
    # By default, each profile gets a new folder in runs/.
    monkeypatch.setattr(command, "_profile", lambda *_: StepProfile(**table_of(table)))
    monkeypatch.setattr(command, "product_rate", lambda *_: 1e9)
    for number in (1, 2):
        assert cli.main(["profile", "pretrain", "model=bert_tiny", *TINY, *TEXT]) == 0
        assert Path(f"runs/profile-mlm-bert-000{number}/profile.json").exists()


def table_of(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "command"}


def test_profile_trains_the_same_steps_as_the_run(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, list[float]] = {"run": [], "profile": []}
    monkeypatch.setattr(RunFolder, "append", lambda self, row: rows[kept].append(row.get("grad_norm")))
    words = ["model=bert_tiny", "log_every=1", *TEXT]
    kept = "run"
    assert cli.main(["pretrain", *TINY, *words, "max_steps=6"]) == 0
    kept = "profile"
    profiled(capsys, "pretrain", *words, "max_steps=6")
    # Two warm-up steps and the profiled one, whose batch is repeated without the profiler.
    trained = [value for value in rows["run"] if value is not None]
    assert rows["profile"][:3] == trained[:3] and len(rows["profile"]) == 4 and len(set(trained)) == 6


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model=electra_tiny"], {"objective: generator", "objective: masked_lm", *LAYERS}),
        pytest.param(
            ["model=t5_tiny"],
            {"cross-attention: projections", "cross-attention: scores", *EVERYWHERE},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["generator", "encoder_decoder"],
)
def test_profile_separates_networks_of_a_model(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], parts: set[str]
) -> None:
    table, _ = profiled(capsys, "pretrain", *words, *TEXT)
    assert parts <= {name for name, row in table["parts"].items() if row["forward"] > 0}
    networks = [row for name, row in table["parts"].items() if name.startswith("objective: ")]
    assert all(row["backward"] > 0 for row in networks)


@pytest.mark.slow
def test_profile_of_lora_has_no_embedding_backward(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, _ = profiled(capsys, "finetune", *TASK, "tuning=lora")
    # A frozen embedding has no gradient.
    assert table["parts"]["embedding"]["backward"] == 0 and table["parts"]["embedding"]["forward"] > 0
    assert all(table["parts"][part]["backward"] > 0 for part in LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in options("model") if name.endswith("_tiny")])
def test_profile_of_every_family_has_all_parts(place: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    table, _ = profiled(capsys, "pretrain", f"model={model}", *TEXT)
    layers = set() if model.removesuffix("_tiny") in NO_TRANSFORMERS else LAYERS
    assert set(table["parts"]) >= EVERYWHERE - (LAYERS - layers)
    assert all(table["parts"][part]["backward"] > 0 for part in layers | {"embedding"})


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["adapter", "bitfit", "head", "ia3", "last_n", "prefix", "prompt", "ptuning"])
def test_profile_of_tuning_methods_has_added_parts(
    place: Path, capsys: pytest.CaptureFixture[str], tuning: str
) -> None:
    table, _ = profiled(capsys, "finetune", *TASK, f"tuning={tuning}")
    assert ("adapters and prefixes" in table["parts"]) == (tuning in ("adapter", "prefix", "prompt", "ptuning"))


def test_profile_of_distillation_separates_teacher(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = finetune("teacher", "model=bert_tiny", "checkpoint=none", "max_steps=2", *TINY[:5])
    words = [word for word in TASK if word != "model=bert_tiny"]
    table, _ = profiled(capsys, "finetune", *words, "model=bert_tiny", f"distill.teacher={teacher}", "distill=soft")
    assert table["parts"]["teacher"]["forward"] > 0 and table["parts"]["teacher"]["backward"] == 0
    assert table["parts"]["distillation: soft"]["forward"] > 0


@pytest.mark.slow
def test_profile_counts_recomputed_layers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, _ = profiled(capsys, "finetune", *TASK)
    shutil.rmtree("seen")
    again, printed = profiled(capsys, "finetune", *TASK, "gradient_checkpointing=true")
    assert again["parts"]["feed-forward"]["calls"] > kept["parts"]["feed-forward"]["calls"]
    assert "layers are recomputed in the backward pass" in printed


@pytest.mark.parametrize("model", ["gpt_tiny", "bart_tiny"])
def test_profile_generate_splits_a_step_of_the_first_batch(
    place: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    pretrain("writer", model=model)
    Path("prompts.txt").write_text("The cat\nA king and a queen\nA\n")
    words = ["profile", "generate", "runs/writer", "input=prompts.txt", "max_new_tokens=5", "min_new_tokens=5"]
    words += ["device=cpu", "precision=fp32"]
    capsys.readouterr()
    assert cli.main([*words, "output=seen"]) == 0
    printed = capsys.readouterr().out
    table = json.loads(Path("seen/profile.json").read_text())
    assert sum(row["forward"] for row in table["parts"].values()) == pytest.approx(table["milliseconds"], rel=1e-6)
    expected = {*LAYERS, "embedding", "head", "choice of tokens", "host"}
    assert set(table["parts"]) >= expected | ({"cross-attention: scores"} if model == "bart_tiny" else set())
    # The first of five tokens is chosen from the prompts.
    assert (table["steps"], table["tokens"], table["command"]) == (4, 3, "generate")
    assert 0 < table["products_milliseconds"] < table["milliseconds"]
    assert "3 prompts read in" in printed and "4 steps of 3 tokens; peak memory" in printed
    assert "backward" not in printed and "micro-batch" not in printed and "further batches" not in printed
    assert Path("seen/trace.json.gz").exists()
    assert cli.main([*words, "batch_tokens=1", "beams=2", "output=beams"]) == 0
    printed = capsys.readouterr().out
    assert "1 prompt read in" in printed and "2 prompts of further batches were not profiled" in printed
    assert json.loads(Path("beams/profile.json").read_text())["tokens"] == 2


def test_profile_generate_needs_a_second_token(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("writer", model="gpt_tiny")
    before = sorted(Path("runs").iterdir())
    capsys.readouterr()
    assert cli.main(["profile", "generate", "runs/writer", "prompt=A", "max_new_tokens=1"]) == 2
    assert "a profile needs two tokens of a text" in capsys.readouterr().err
    assert cli.main(["profile", "generate", "runs/writer", "prompt=A", "output=text.txt"]) == 2
    assert "output=text.txt exists and is not empty" in capsys.readouterr().err
    assert sorted(Path("runs").iterdir()) == before, "no folder is left"


INVALID = [
    ("pretrain model=bert_tiny devices=2", "lmtool profile measures a single process"),
    ("pretrain steps=0", "steps: given 0 (whole number); allowed: a whole number, at least 1"),
    ("pretrain steps=some", 'steps: given "some" (text); allowed: a whole number, at least 1'),
    ("pretrain steps=2 steps=3", "steps=3: steps is set twice"),
    ("-m pretrain seed=1,2", "-m: lmtool profile does not sweep"),
    ("pretrain seed=1,2", "seed"),
    ("evaluate", "profile evaluate: runs a few steps of pretrain or finetune"),
    ("generat", "profile generat: runs a few steps of pretrain or finetune"),
    ("finetune task=glue task.path=rows checkpoint=none model=bert_tiny", "trains a run for each of its tasks"),
    ("pretrain model=bert_tiny output=text.txt", "output=text.txt exists and is not empty"),
    ("pretrain model=bert_tiny name=before", "name=before: the run already exists (finished)"),
    ("pretrain model=bert_tiny run_dir=runs/before", "run_dir=runs/before: the run already exists (finished)"),
    (
        "pretrain branch=runs/before@last name=grown max_steps=3",
        "branch=runs/before@1: a profile trains a new run",
    ),
    ("pretrain model=bert_tiny data=text data.path=nowhere.txt", "nowhere.txt"),
]


def test_invalid_profile_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("before", "max_steps=1")
    left = sorted(Path("runs").iterdir())
    for words, message in INVALID:
        given = words.split()
        typed = {word.partition("=")[0] for word in given}
        text = [] if {"finetune"} & typed else ["data=text", "data.path=text.txt"]
        more = [] if "branch" in typed else [*TINY, *text, "cache_dir=cache"]
        capsys.readouterr()
        more = [word for word in more if word.partition("=")[0] not in typed]
        assert cli.main(["profile", *given, *more]) == 2, words
        said = capsys.readouterr().err
        assert message in said and "hint:" in said, f"{words}: {said}"
    assert sorted(Path("runs").iterdir()) == left, "no folder is created"


def test_remarks_suggest_overrides_for_slow_parts() -> None:
    def spent(forward: float, calls: float = 10) -> dict[str, float]:
        return {"forward": forward, "backward": 0.0, "host": 0.0, "calls": calls}

    parts = {
        "attention: scores": spent(20), "host": spent(20), "optimizer: step": spent(20), "head": spent(30),
        "data": spent(10),
    }  # fmt: skip
    metadata = {
        "native_bf16": True,
        "attention_dropout": 0.1,
        "vocab_size": 30522,
        "batch_tokens": 512,
        "compiled": False,
    }
    heavy = StepProfile(
        100, 90, parts, 40, 1e9, 5, 512, 2, 10**8, "fp32", "cuda:0", 1, {**metadata, "padding_avoided": 0.4}
    )
    said = " ".join(remarks(heavy))
    for words in (
        "precision=bf16", "model.attention_dropout=0", "compile=true", "raise batch_tokens above 512", "30,522",
        "the loader", "micro_batch_tokens above", "packing avoids",
    ):  # fmt: skip
        assert words in said
    calm = StepProfile(100, 90, {"feed-forward": spent(100)}, 90, 1e9, 5, 512, 1, 10**8, "bf16", "cpu", 1, metadata)
    assert not list(remarks(calm))
    (emulated,) = remarks(replace(calm, metadata={**metadata, "native_bf16": False}))
    assert "precision=fp32" in emulated
