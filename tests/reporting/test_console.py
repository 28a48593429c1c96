from __future__ import annotations

import io
import math
import os
import pty
import shlex
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
    """A function that writes log lines to the file."""
    return lambda line: print(line, file=file)


def report_training(output: Output, log_every: int = 10, steps: int = 100) -> ProgressDisplay:
    """Report a training of 0.2 s a step to a progress display."""
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


def print_screens(output: Output) -> None:
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
        elapsed=210.0,
        baseline=BASELINE,
        run_dir="runs/a",
        report="runs/a/report.html",
        next_commands=["lmtool x"],
    )


def test_plain_output_has_one_line_per_log_interval():
    stream, log = io.StringIO(), io.StringIO()
    report_training(Output(stream, log_to(log)))
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if "validation" not in line]
    assert len(steps) == 11  # the first step, then one per interval
    assert steps[0] == "step 1/100 · loss 8.980 · lr 4.5e-4 · 1,000 tokens/s"
    assert steps[1] == "step 10/100 · loss 8.800 · lr 4.5e-4 · 1,000 tokens/s · left 0:18"
    assert lines[-1] == "step 100 · validation · loss 6.000 · mlm accuracy 0.100 · ★ best"
    assert not set(stream.getvalue()) & {"\r", "\x1b", "\x08"}
    assert [line for line in log.getvalue().splitlines() if "checkpoint" not in line] == lines


def test_start_and_end_screens_show_plan_and_result():
    stream = io.StringIO()
    print_screens(Output(stream))
    text = stream.getvalue()
    assert not set(text) & {"\r", "\x1b", "\x00", "\u202e"}
    for part in ("resumes from step 400", "documents 1,234", "truncated fraction 1.2%", "4.09 M tokens", "3.4 epochs"):
        assert part in text
    assert "unigram: loss 6.810" in text and "about 4 min" in text
    assert "loss 5.000 · better than the unigram baseline, 6.810, by 1.810" in text
    assert "20,450 tokens/s" in text and "padding 0%" in text and "report" in text and "lmtool x" in text
    assert len(text.splitlines()) < 30


def test_only_best_evaluations_have_star():
    stream = io.StringIO()
    progress = ProgressDisplay(Output(stream), "accuracy")
    progress.on_start(0, None, None)
    for step, accuracy in enumerate((0.5, 0.7, float("nan"), 0.6)):
        progress.on_evaluation({"step": step, "loss": 1.0, "accuracy": accuracy})
    assert [line.endswith("★ best") for line in stream.getvalue().splitlines()] == [True, True, False, False]
    assert progress.best == 0.7


def test_time_left_follows_nearer_budget():
    time = [0.0]
    progress = ProgressDisplay(Output(io.StringIO()), now=lambda: time[0])
    progress.on_start(0, 1000, 50.0)
    progress.on_step({"step": 1, "loss": 1.0, "tokens": 100, "tokens_per_second": 50.0})
    assert math.isnan(progress.seconds_left(1)), "the first step does not predict the others"
    time[0] = 16.0  # half of the time is evaluation, which max_minutes does not count
    progress.on_step({"step": 11, "loss": 1.0, "tokens": 1100, "tokens_per_second": 125.0})
    assert progress.seconds_left(11) == 2 * 40.0
    progress.on_start(11, 1000, 40.0)  # the first row of a resumed run includes earlier tokens
    progress.on_step({"step": 20, "loss": 1.0, "tokens": 2000, "tokens_per_second": 100.0})
    time[0] = 26.0
    progress.on_step({"step": 30, "loss": 1.0, "tokens": 3000, "tokens_per_second": 100.0})
    assert progress.seconds_left(30) == 30.0


def test_progress_counts_to_budget_that_ends_run():
    """A budget in minutes gives a number of steps only after the slow first steps."""
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
        (0.5, 100, "done in 1 min 5 s, training 1 min 0 s · 10 steps", "about 4 min 40 s"),
        (
            30.0,
            40_900,
            "done in 1 min 5 s, training 1 min 0 s, evaluation 30 s in all · 10 steps",
            "about 4 min 40 s, and 15.4 s of evaluation",
        ),
    ],
)
def test_evaluation_time_is_shown_if_noticeable(evaluated: float, tokens: int, end: str, planned: str):
    stream = io.StringIO()
    result = {"status": "done", "seconds": 60.0, "evaluation_seconds": evaluated, "steps": 10}
    print_end(
        Output(stream), result=result, elapsed=65.0, baseline=None, run_dir="runs/x", report="r", next_commands=()
    )
    assert stream.getvalue().splitlines()[0] == end
    assert replace(plan_of_steps(), evaluations=10, evaluation_tokens=tokens).time_text == planned


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_broken_output_pipe_does_not_stop_training():
    log = io.StringIO()
    report_training(Output(BrokenStream(), log_to(log)))
    assert "step 100/100" in log.getvalue()


def test_unwritable_log_warns_once():
    stream = io.StringIO()
    report_training(Output(stream, log_to(BrokenStream())))
    assert stream.getvalue().count("warning: the log file cannot be written") == 1
    assert "step 100/100" in stream.getvalue()


def test_process_piped_into_head_finishes_with_status_0(tmp_path):
    code = f"""
        from lmtool.reporting.console import Output
        output = Output()
        for step in range(20000):
            output.line(f"step {{step}} " + "x" * 50)
        open({str(tmp_path / "done")!r}, "w").close()
    """
    command = f'{shlex.quote(sys.executable)} -c "$CODE" | head -1; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CODE": textwrap.dedent(code)}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "done").exists()


def test_ascii_stream_gets_ascii_replacements():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Output(stream).line("★ best · ± 1 … λ")
    assert raw.getvalue() == b"* best | +- 1 ... ?\n"


@pytest.fixture
def terminal_output(tmp_path, monkeypatch):
    """A function from the name of a terminal to the output of a training on it; the log is log.txt."""

    def write(term: str) -> str:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "100")
        main, child = pty.openpty()
        seen: list[bytes] = []

        def read() -> None:
            with suppress(OSError):  # EIO after the terminal was closed
                while part := os.read(main, 65536):
                    seen.append(part)

        reader = threading.Thread(target=read)
        reader.start()
        with (tmp_path / "log.txt").open("w") as log, os.fdopen(child, "w") as terminal:
            output = Output(terminal, log_to(log))
            print_screens(output)
            report_training(output)
        reader.join()
        os.close(main)
        return b"".join(seen).decode()

    return write


def test_terminal_shows_live_bar_and_log_stays_plain(terminal_output, tmp_path):
    text = terminal_output("xterm")
    assert "\x1b[" in text and "\x1b[?25h" in text  # the cursor comes back
    assert "train loss" in text and "★" in text and "left" in text
    assert "<script>" in text and "\x1b[31m\r" not in text
    log = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in log and "\r" not in log and "step 100/100" in log and "checkpoint" in log


def test_dumb_terminal_gets_plain_output(terminal_output):
    text = terminal_output("dumb")
    assert "\x1b" not in text and "step 100" in text


def test_table_is_aligned_and_escaped():
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
def test_verdict_follows_standard_error(score, verdict):
    assert score.verdict == verdict
    assert score.sentence and score.text


def test_errors_of_the_loss_and_of_its_gain_are_told_apart():
    score = Score("loss", 6.668, 0.017, 6.569, "unigram", 0.0035)
    assert score.text == "loss 6.668 ± 0.017"
    assert score.sentence == "worse than the unigram baseline, 6.569, by 0.099, 28.3 standard errors"


def test_baseline_of_other_metric_is_ignored():
    score = score_of({"metric": "f1", "value": 0.5}, {"name": "majority", "metric": "accuracy", "value": 0.4})
    assert score is not None and score.baseline is None
    assert score_of({}, None) is None


def test_numbers_are_formatted_for_people():
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


def test_label_names_are_shown_unchanged() -> None:
    few = {"labels": {"not_entailment": 3, "a b": 4}}
    assert _sections("data", few) == [("data", "labels: not_entailment 3 · a b 4")]
    many = {"labels": {f"class_{number}": number + 7 for number in range(30)}}
    assert _sections("data", many) == [("data", "labels: 30, from class_0 7 to class_29 36")]
