"""A run in phases: the data and settings of each, its boundaries, exact resume around a boundary, and keys that phases
cannot change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.config import compose
from lmtool.errors import ConfigError
from lmtool.reporting.run_files import phase_starts, read_run
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.shorthands import with_sections
from lmtool.runs.finding import checkpoint_folder
from lmtool.training import loop
from lmtool.training.phases import normalize_phases, words_of_phase
from tests.commands.conftest import TINY, merge_overrides, pretrain, working_in, write_text

PHASES = "phases=[{share: .6}, {max_length: 24, batch_examples: 6, objective.probability: .4, optimizer.lr: .0005}]"
RUN = ["objective=mlm", "max_length=16", "max_steps=10", "checkpoint_every=1", "evaluate_every=4"]
BOUNDARY = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("phases")
    with working_in(folder):
        yield folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    return pretrain("whole", *RUN, PHASES)


def rows(run: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in read]


def last(run: Path) -> dict[str, Any]:
    return load_file(checkpoint_folder(run / "checkpoints" / "last") / "model.safetensors")


def test_each_phase_uses_and_reports_its_settings(whole: Path) -> None:
    train = [row for row in rows(whole) if row["split"] == "train"]
    assert [row["phase"] for row in rows(whole) if row["split"] == "validation"] == [1, 2, 2]
    assert [row["phase"] for row in train] == [1] * BOUNDARY + [2] * 4
    tokens = [
        row["tokens"] - before for row, before in zip(train, [0, *(row["tokens"] for row in train)], strict=False)
    ]
    assert max(tokens[:BOUNDARY]) == 256 and 0 < min(tokens[BOUNDARY:]) <= max(tokens[BOUNDARY:]) <= 6 * 24
    factor = [row["learning_rate"] / (1 - (row["step"] - 1) / 10) for row in train if row["step"] > 1]
    assert factor == pytest.approx([factor[0]] * (BOUNDARY - 1) + [0.0005] * 4)
    result = json.loads((whole / "result.json").read_text())
    boundaries = [(phase["first_step"], phase["last_step"]) for phase in result["phases"]]
    assert boundaries == [(1, BOUNDARY), (BOUNDARY + 1, 10)] and result["phases"][1]["given"] == (
        "max_length=24 batch_examples=6 objective.probability=0.4 optimizer.lr=0.0005"
    )
    metadata = json.loads((whole / "facts.json").read_text())["data"]
    assert (
        metadata["phase 1"]["longest"] == 16
        and metadata["phase 2"]["longest"] == metadata["validation"]["longest"] == 24
    )
    assert metadata["validation"]["predicted_fraction"] == metadata["phase 2"]["predicted_fraction"] == 0.4


def test_rate_follows_batch_of_each_phase(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer.lr=.001", "optimizer.batch_scaling={rule: linear, examples: 8}", "schedule=constant"]
    phases = "phases=[{share: .5, batch_examples: 4}, {batch_examples: 16}]"
    run = pretrain(
        "scaled", *RUN, *words, phases, "max_steps=4", "batch_examples=4", "batch_tokens=null", "log_every=1"
    )
    assert "learning rate 0.0005: optimizer.lr=0.001 is for 8 examples" in capsys.readouterr().out
    train = [row["learning_rate"] for row in rows(run) if row["split"] == "train"]
    assert train == pytest.approx([0.0005, 0.0005, 0.002, 0.002])
    pretrain("refused", *RUN, *words, "batch_examples=null", "batch_tokens=256", status=2)
    shown = capsys.readouterr().err
    assert "reference in examples (8), but batch_tokens=256 in tokens" in shown and "tokens: N}" in shown
    words[1] = "optimizer.batch_scaling={rule: linear, tokens: 8}"
    pretrain("refused", *RUN, *words, "batch_examples=4", "batch_tokens=null", status=2)
    shown = capsys.readouterr().err
    assert "reference in tokens (8), but batch_examples=4 in examples" in shown and "examples: N}" in shown


def test_report_marks_phase_boundaries(whole: Path) -> None:
    run = read_run(whole)
    assert phase_starts(run) == phase_starts(replace(run, result={})) == [BOUNDARY + 1]


@pytest.mark.slow
def test_inspect_shows_each_phase(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=bert_tiny", *TINY, "data=text", "data.path=text.txt", "cache_dir=cache", "objective=mlm"]
    words += ["max_length=16", "phases=[{share: .5}, {max_length: 24, objective.probability: .4}]"]
    assert (
        cli.main(["inspect", "pretrain", *merge_overrides(words), "n=1", "tokens=3000", "output=examples.jsonl"]) == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "phase 2 · max_length=24 objective.probability=0.4" in printed
    shown = [json.loads(line) for line in (place / "examples.jsonl").read_text().splitlines()]
    assert [(row["phase"], len(row["input"]["ids"]), len(row["targets"]["mlm"])) for row in shown] == [
        (1, 16, 2), (2, 24, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("step", [BOUNDARY - 1, BOUNDARY, BOUNDARY + 1])
def test_run_resumes_around_phase_boundary(
    whole: Path, step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = loop.save

    def killed(keeper: Any, progress: Any, *more: Any) -> bool:
        saved = save(keeper, progress, *more)
        if progress.step == step:
            raise KeyboardInterrupt
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", killed)
        run = pretrain(f"killed{step}", *RUN, PHASES, status=130)
    assert json.loads((checkpoint_folder(run / "checkpoints" / "last") / "state.json").read_text())["step"] == step
    pretrain(f"killed{step}", *RUN, PHASES)
    assert f"resumes from step {step}" in capsys.readouterr().out
    assert rows(run) == rows(whole)
    ours, theirs = last(run), last(whole)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_checkpoint_uses_settings_of_last_phase(whole: Path) -> None:
    from lmtool.session.trained import read_trained
    from lmtool.training.precision import select_device, select_precision

    config = read_trained(str(whole), True, select_precision("fp32", select_device("cpu"))).config
    assert (config.max_length, config.batch_examples, config.batch_tokens, config.phases) == (24, 6, None, ())


def test_changed_text_of_a_phase_is_refused_on_resume(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(place / "other.txt")
    words = [*RUN, "max_steps=4", "phases=[{share: .5}, {data: text, data.path: other.txt, max_length: 24}]"]
    run = pretrain("texts", *words)
    data = json.loads((checkpoint_folder(run) / "data.json").read_text())
    assert data.keys() == {"data=text", "phases.1 data=text"}
    (run / "result.json").unlink()
    (place / "other.txt").write_text("Another text, of which the run knew nothing.\n\n" * 40)
    pretrain("texts", *words, status=2)
    assert "phases.1 data=text: other text" in capsys.readouterr().err


def test_equal_phases_match_run_without_phases(place: Path) -> None:
    """Two equal phases read the examples in the same order as a run without phases."""
    words = [*RUN, "max_steps=8"]
    plain, split = pretrain("plain", *words), pretrain("split", *words, "phases=[{share: .5}, {batch_tokens: 256}]")
    losses = [[row["loss"] for row in rows(run)] for run in (plain, split)]
    assert losses[0] == losses[1]


def test_budget_of_run_with_phases_cannot_grow(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RUN, "schedule=constant", PHASES]
    run = pretrain("grows", *words)
    pretrain("grows", *words, "max_steps=14", status=2)
    assert "its phases are fractions of the budget" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["steps"] == 10


CASES = [
    ("clm", "gpt_tiny", "max_length: 24"),
    ("span_corruption", "t5_tiny", "objective.density: .3"),
    ("denoising", "bart_tiny", "objective.text_infilling: .5, max_length: 24"),
    ("rtd", "electra_tiny", "objective.probability: .3"),
    ("span", "bert_tiny", "objective.longest: 3, max_length: 24"),
    ("mlm_nsp", "bert_tiny", "max_length: 24, objective.short_sequence_probability: 0"),
    ("mixture", "bert_tiny", "objective.with.mlm.probability: .3, max_length: 24"),
    ("prefix_lm", "gpt_tiny", "max_length: 24"),
]


@pytest.mark.slow
@pytest.mark.parametrize("objective, model, given", CASES)
def test_every_objective_runs_in_phases(place: Path, objective: str, model: str, given: str) -> None:
    words = [f"objective={objective}", "max_length=16", "max_steps=4", f"phases=[{{share: .5}}, {{{given}}}]"]
    run = pretrain(f"of_{objective}", *words, model=model)
    assert [row["phase"] for row in rows(run) if row["split"] == "train"] == [1, 1, 2, 2]


@pytest.fixture(scope="module")
def base(place: Path) -> dict[str, Any]:
    read = compose.read_overrides(["model=bert_tiny", "objective=mlm"], compose.accepted_overrides("pretrain"))
    return with_sections(compose.compose("pretrain", read))


def decode(base: dict[str, Any], *phases: Any, **more: Any) -> Any:
    return decode_config("pretrain", with_sections({**base, "phases": list(phases), **more}))


HALF = {"share": 0.5}
INVALID = [
    ([HALF, {"max_length": 1024}], "phases.1: max_length=1024 is more than model.max_positions=512"),
    ([HALF, {"max_lenght": 64}], "phases.1: unknown key max_lenght | did you mean max_length=64?"),
    ([HALF, {"share": 0.6}], "phases: the shares add up to 1.1 instead of 1"),
    ([{}, HALF], "missing required value: phases.0.share"),
    ([{"share": 1}, {}], "phases.1.share=0.0: a share must be above 0 and at most 1"),
    ([{"share": 0.99999}, {}], "phases.1.share=1e-05 of max_steps=10000 is less than one step"),
    ([HALF, {"model.num_layers": 3}], "phases.1.model: model cannot change during a run"),
    ([HALF, {"seed": 3}], "phases.1.seed=3: seed cannot change during a run"),
    ([HALF, {"objective.pairs": "nsp"}], "phases.1.objective.pairs=nsp: pairs cannot change during a run"),
    ([HALF, {"objective": "span"}], "phases.1.objective.name=span: name cannot change during a run"),
    ([HALF, {"optimizer.weight_decay": 0}], "phases.1.optimizer.weight_decay=0: weight_decay cannot change"),
    ([HALF, {"objective.probability": 2}], "phases.1: objective.probability: given 2 (whole number)"),
    ([HALF, {"data": "txt"}], "phases.1.data=txt is not one of"),
    ([HALF, {"data": "text"}], "phases.1: missing required value: data.path | set data.path=..."),
    ([HALF, {"batch_tokens": 64}], "phases.1: batch_tokens=64 holds no sequence of max_length=128"),
    ([1, HALF], "phases[0]: given 1 (whole number)"),
]


@pytest.mark.parametrize("phases, message", INVALID, ids=lambda value: str(value)[:40])
def test_invalid_phase_is_refused(base: dict[str, Any], phases: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(base, *phases)
    assert any(message in f"{problem.message} | {problem.hint}" for problem in error.value.problems), (
        error.value.problems
    )


def test_finetune_refuses_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", "model=bert_tiny", "checkpoint=none", "task=pydocs", "phases=[{share: 1}]"]) == 2
    assert "unknown key phases\nhint: omit it: phases is a key of lmtool pretrain" in capsys.readouterr().err


def test_errors_of_all_phases_are_reported_together(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        decode(base, {"share": 0.5, "max_lenght": 3}, {"objective.probability": 2}, log_every=0)
    assert {problem.key for problem in error.value.problems} == {
        "log_every", "phases.0.max_lenght", "phases.1.objective.probability",
    }  # fmt: skip


@pytest.mark.parametrize(
    "phases, more, message",
    [
        ([HALF, {"max_length": 64}], {"max_epochs": 2.0}, "max_epochs=2: the length of an epoch changes"),
        ([{**HALF, "max_length": 32}, {"max_length": 64}], {"max_length": 48}, "max_length=48 is not used"),
        ([HALF, {}], {"distill": {"name": "self"}}, "a distilled run has no phases"),
    ],
)
def test_options_that_conflict_with_phases_are_refused(
    base: dict[str, Any], phases: Any, more: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        decode(base, *phases, **more)
    assert any(message in problem.message for problem in error.value.problems), error.value.problems


def test_max_epochs_is_allowed_for_phases_of_one_length(base: dict[str, Any]) -> None:
    config = decode(base, HALF, {"objective.probability": 0.3}, max_epochs=2.0)
    assert [form.objective.probability for form in config.phase_configs] == [0.15, 0.3]


def test_saved_phases_decode_to_same_config(base: dict[str, Any]) -> None:
    config = decode(base, {"share": 0.9, "optimizer.lr": 0.01}, {"data": {"name": "text", "path": "x.txt"}})
    assert [phase["share"] for phase in config.phases] == [0.9, 0.1]
    assert words_of_phase(config.phases[0]) == "optimizer.lr=0.01"
    assert words_of_phase(config.phases[1]) == "data.name=text data.path=x.txt"
    saved = json.loads(config.model_dump_json())
    assert normalize_phases(saved["phases"]) == saved["phases"]
    again = decode_config("pretrain", saved, reads_checkpoint=False)
    assert again.phase_configs == config.phase_configs and config.phase_configs[0].optimizer.lr == 0.01
    assert config.phase_configs[0].data.name == "pydocs" and config.phase_configs[1].data.path == "x.txt"
    assert config.phase_configs[1].data.documents == "joined"
