from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

import pytest

from lmtool.costs.plan import Forward, Sizes, StepCosts, Work
from lmtool.reporting.console import Output, table_lines
from lmtool.reporting.costs import RunPlan
from lmtool.reporting.scores import Score, score_of
from lmtool.reporting.screens import ProgressDisplay, StartScreen, _sections, print_end, print_start
from lmtool.reporting.text import clock, count, duration, exponent, lower_is_better, number, percent, plain, size

from .conftest import HOSTILE

BASELINE = {"name": "unigram", "metric": "loss", "value": 6.81}


def log_to(file: TextIO) -> Callable[[str], None]:
    """Takes the lines of a log."""
    return lambda line: print(line, file=file)


def train(output: Output, log_every: int = 10, steps: int = 100) -> ProgressDisplay:
    """A training of 0.2 s a step, told step by step."""
    time = [0.0]
    with ProgressDisplay(output, "loss", log_every, BASELINE, now=lambda: time[0]) as progress:
        progress.on_start(0, steps, None)
        for step in range(1, steps + 1):
            time[0] = step * 0.2
            progress.on_step({"step": step, "loss": 9 - step / 50, "learning_rate": 4.5e-4, "tokens_per_second": 999.6})
            if step % 50 == 0:
                progress.on_evaluation(
                    {"step": step, "split": "validation", "loss": 8 - step / 50, "mlm_accuracy": 0.1}
                )
                progress.on_checkpoint(step, "runs/x/checkpoints/step_00000050")
    return progress


def plan_of_steps() -> RunPlan:
    sizes = Sizes({"backbone": 1_600_000}, 1_600_000, 3_200_000)
    costs = StepCosts([Work(1.0, 5.6e5, 256, 57)], 4090, sizes, Forward(4090))
    return replace(costs.plan(), steps=1000, step_seconds=(0.28, 0.28))


def screens(output: Output) -> None:
    planned = replace(plan_of_steps(), budgets={"max_steps": 1000}, ends_by="max_steps", epochs=3.4)
    screen = StartScreen(
        command="pretrain",
        run_dir="runs/a",
        choices={"model": "bert_tiny", "data": HOSTILE},
        data={"source": HOSTILE, "train": {"documents": 1234, "truncated_fraction": 0.0123}},
        model={"name": "bert_tiny", HOSTILE: "x"},
        plan=planned,
        baseline=BASELINE,
        machine={"device": "cpu", "precision": "bf16"},
        resumed_step=400,
    )
    print_start(output, screen)
    result = {
        "status": "done",
        "metric": "loss",
        "value": 5.0,
        "metrics": {"loss": 5.0, "accuracy": 0.2},
        "steps": 1000,
    }
    result |= {"seconds": 200.0, "tokens": 4_090_000, "tokens_per_second": 20450.0, "padding_fraction": 0.0}
    print_end(
        output,
        result=result,
        baseline=BASELINE,
        run_dir="runs/a",
        report="runs/a/report.html",
        next_commands=["lmtool x"],
    )


def test_plain_output_has_one_line_an_interval_and_no_escapes():
    stream, log = io.StringIO(), io.StringIO()
    train(Output(stream, log_to(log)))
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if "validation" not in line]
    assert len(steps) == 11  # the first step, then one an interval
    assert steps[0] == "step 1/100 · loss 8.980 · lr 4.5e-4 · 1,000 tokens/s"
    assert steps[1] == "step 10/100 · loss 8.800 · lr 4.5e-4 · 1,000 tokens/s · left 0:18"
    assert lines[-1] == "step 100 · validation · loss 6.000 · mlm accuracy 0.100 · ★ best"
    assert not set(stream.getvalue()) & {"\r", "\x1b", "\x08"}
    assert [line for line in log.getvalue().splitlines() if "checkpoint" not in line] == lines


def test_screens_say_what_will_happen_and_what_did():
    stream = io.StringIO()
    screens(Output(stream))
    text = stream.getvalue()
    assert not set(text) & {"\r", "\x1b", "\x00", "\u202e"}
    for part in ("resumes from step 400", "documents 1,234", "truncated fraction 1.2%", "4.09 M tokens", "3.4 epochs"):
        assert part in text
    assert "unigram: loss 6.810" in text and "about 4 min" in text
    assert "loss 5.000 · better than the unigram baseline, 6.810, by 1.810" in text
    assert "20,450 tokens/s" in text and "padding 0%" in text and "report" in text and "lmtool x" in text
    assert len(text.splitlines()) < 30


def test_only_the_best_evaluation_has_the_star():
    stream = io.StringIO()
    progress = ProgressDisplay(Output(stream), "accuracy")
    progress.on_start(0, None, None)
    for step, accuracy in enumerate((0.5, 0.7, float("nan"), 0.6)):
        progress.on_evaluation({"step": step, "loss": 1.0, "accuracy": accuracy})
    assert [line.endswith("★ best") for line in stream.getvalue().splitlines()] == [True, True, False, False]
    assert progress.best == 0.7


def test_time_left_follows_the_nearer_budget():
    time = [0.0]
    progress = ProgressDisplay(Output(io.StringIO()), now=lambda: time[0])
    progress.on_start(0, 1000, 50.0)
    progress.on_step({"step": 1, "loss": 1.0, "tokens": 100, "tokens_per_second": 50.0})
    assert math.isnan(progress.seconds_left(1)), "the first step says nothing of the others"
    time[0] = 16.0  # half of it an evaluation, which a budget of minutes does not count
    progress.on_step({"step": 11, "loss": 1.0, "tokens": 1100, "tokens_per_second": 125.0})
    assert progress.seconds_left(11) == 2 * 40.0
    progress.on_start(11, 1000, 40.0)  # a resumed run: its first row counts the tokens of the steps before, too
    progress.on_step({"step": 20, "loss": 1.0, "tokens": 2000, "tokens_per_second": 100.0})
    time[0] = 26.0
    progress.on_step({"step": 30, "loss": 1.0, "tokens": 3000, "tokens_per_second": 100.0})
    assert progress.seconds_left(30) == 30.0


def test_the_bar_counts_to_the_budget_that_ends_the_run():
    """A budget in minutes counts where the speed is known: the first steps are slow, and end nothing."""
    stream = io.StringIO()
    progress = ProgressDisplay(Output(stream), now=lambda: 0.0)
    for steps in (6000, 40, None):
        progress.on_start(0, steps, 100.0)
        for step, tokens, rate in ((1, 10, 20.0), (10, 100, 20.0)):
            progress.on_step({"step": step, "loss": 1.0, "tokens": tokens, "tokens_per_second": rate})
    heads = [line.split(" · ")[0] for line in stream.getvalue().splitlines()]
    assert heads == ["step 1", "step 10/~200", "step 1/40", "step 10/40", "step 1", "step 10/~200"]


@pytest.mark.parametrize(
    ("evaluated", "tokens", "end", "planned"),
    [
        (0.5, 100, "done in 1 min 0 s · 10 steps", "about 4 min 40 s"),
        (
            30.0,
            40_900,
            "done in 1 min 30 s, 1 min 0 s of it training · 10 steps",
            "about 4 min 40 s, and 15.4 s of evaluation",
        ),
    ],
)
def test_evaluations_are_counted_where_they_take_time(evaluated: float, tokens: int, end: str, planned: str):
    stream = io.StringIO()
    result = {"status": "done", "seconds": 60.0, "evaluation_seconds": evaluated, "steps": 10}
    print_end(Output(stream), result=result, baseline=None, run_dir="runs/x", report="r", next_commands=())
    assert stream.getvalue().splitlines()[0] == end
    assert replace(plan_of_steps(), evaluations=10, evaluation_tokens=tokens).time_text == planned


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_goes_away_ends_nothing():
    log = io.StringIO()
    train(Output(Gone(), log_to(log)))
    assert "step 100/100" in log.getvalue()


def test_a_log_that_cannot_be_written_is_told_once():
    stream = io.StringIO()
    train(Output(stream, log_to(Gone())))
    assert stream.getvalue().count("warning: the log file cannot be written") == 1
    assert "step 100/100" in stream.getvalue()


def test_piped_into_head_the_process_goes_on_and_exits_with_zero(tmp_path):
    code = f"""
        from lmtool.reporting.console import Output
        output = Output()
        for step in range(20000):
            output.line(f"step {{step}} " + "x" * 50)
        open({str(tmp_path / "done")!r}, "w").close()
    """
    command = f'{sys.executable} -c "$CODE" | head -1; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CODE": textwrap.dedent(code)}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "done").exists()


def test_a_narrow_encoding_gets_plain_letters():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Output(stream).line("★ best · ± 1 … λ")
    assert raw.getvalue() == b"* best | +- 1 ... ?\n"


@pytest.fixture
def on_a_terminal(tmp_path, monkeypatch):
    """A function from the name of a terminal to what a training writes to it; its log is log.txt."""

    def write(term: str) -> str:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "100")
        main, child = pty.openpty()
        seen: list[bytes] = []

        def read() -> None:
            with suppress(OSError):  # EIO: it was closed
                while part := os.read(main, 65536):
                    seen.append(part)

        reader = threading.Thread(target=read)
        reader.start()
        with (tmp_path / "log.txt").open("w") as log, os.fdopen(child, "w") as terminal:
            output = Output(terminal, log_to(log))
            screens(output)
            train(output)
        reader.join()
        os.close(main)
        return b"".join(seen).decode()

    return write


def test_a_terminal_shows_a_live_bar_and_rows_and_the_log_stays_plain(on_a_terminal, tmp_path):
    text = on_a_terminal("xterm")
    assert "\x1b[" in text and "\x1b[?25h" in text  # the cursor comes back
    assert "train loss" in text and "★" in text and "left" in text
    assert "<script>" in text and "\x1b[31m\r" not in text
    log = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in log and "\r" not in log and "step 100/100" in log and "checkpoint" in log


def test_a_dumb_terminal_is_plain(on_a_terminal):
    text = on_a_terminal("dumb")
    assert "\x1b" not in text and "step 100" in text


def test_table_is_aligned_and_safe():
    lines = table_lines(["run", "accuracy"], [["a", 0.5], ["longer\x1b[0m", None]])
    assert lines == ["run            accuracy", "-------------  --------", "a                 0.500", "longer\\x1b[0m"]


@pytest.mark.parametrize(
    ("score", "verdict"),
    [
        (Score("loss", 5.0, 0.1, 6.0), "better"),
        (Score("accuracy", 0.5, None, 0.6), "worse"),
        (Score("accuracy", 0.61, 0.02, 0.6), "unclear"),
        (Score("accuracy", 0.61), "unknown"),
        (Score("loss", float("nan"), 0.1, 6.0), "unknown"),
    ],
)
def test_verdict(score, verdict):
    assert score.verdict == verdict
    assert score.sentence and score.text


def test_a_baseline_of_another_metric_is_no_baseline():
    score = score_of({"metric": "f1", "value": 0.5}, {"name": "majority", "metric": "accuracy", "value": 0.4})
    assert score is not None and score.baseline is None
    assert score_of({}, None) is None


def test_numbers_as_a_person_reads_them():
    assert [count(n) for n in (7, 1234, 4_422_000, 1.1e12)] == ["7", "1,234", "4.42 M", "1.1 T"]
    assert [size(n) for n in (0, 17_500_000)] == ["0 B", "17.5 MB"]
    assert [duration(s) for s in (18.24, 200, 9000, 200_000)] == ["18.2 s", "3 min 20 s", "2 h 30 min", "2 d 7 h"]
    assert [clock(s) for s in (9, 200, 9000, float("nan"))] == ["0:09", "3:20", "2:30:00", "-:--"]
    assert [number(n) for n in (0.8123, 12.0, 0.00012, 3)] == ["0.812", "12.000", "1.20e-04", "3"]
    assert [percent(p) for p in (0, 0.153, 0.00012, 1)] == ["0%", "15.3%", "0.012%", "100%"]
    assert [exponent(p) for p in (0.00045, 0.001, 0)] == ["4.5e-4", "1e-3", "0"]
    assert plain("a\x1b[1m\n\u202eb", 100) == "a\\x1b[1m\\n\\u202eb"
    assert len(plain("x" * 500, 10)) == 10
    assert [lower_is_better(m) for m in ("loss", "mlm_loss", "mse", "accuracy", "f1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_labels_are_shown_as_they_are_written() -> None:
    few = {"labels": {"not_entailment": 3, "a b": 4}}
    assert _sections("data", few) == [("data", "labels: not_entailment 3 · a b 4")]
    many = {"labels": {f"class_{number}": number + 7 for number in range(30)}}
    assert _sections("data", many) == [("data", "labels: 30, from class_0 7 to class_29 36")]
