"""Figures and tables of the benchmark, computed from generated rows and fake workers: nothing is timed, and the
transformers Trainer is not needed."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

# Answers like scripts/timing/worker.py at a fixed rate: lmtool is four times as fast and needs half the memory. The
# variant that settings["broken"] names ends with an error.
FAKE_WORKER = """
import json, os, sys
name, settings = sys.argv[1], json.loads(sys.argv[3])
own = name.startswith("lmtool")
if name == settings.get("broken"):
    sys.exit("RuntimeError: out of paper")
if name == "prepare":
    print(json.dumps({"text": "text", "gflops": {"fp32": 10, "bf16": 20}}))
    sys.exit()
if name == "check":
    step = {"loss": 1.0, "norm": 2.0, "rival_loss": 1.0, "rival_norm": 2.0}
    if settings.get("use"):
        step = {"results": "tokens", "count": 512, "apart": 0, "tolerance": 0.0}
    print(json.dumps({"steps": [step] * len(settings["pairs"]),}))
    sys.exit()
flops = {"flops_per_token": 5e6} if own else {}
print(json.dumps({"ready": name, "imports_bytes": 10, "parameters": 7, **flops}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    steps, options = command["steps"], command["options"]
    if not own and options and options.get("at_once") == settings.get("broken_at", 0):
        sys.exit("RuntimeError: out of ink")
    seconds = steps * (0.25 if own else 1.0)
    row = {"steps": steps, "tokens": 100 * steps, "examples": steps, "slots": 200 * steps}
    row |= {"texts": steps, "candidates": steps, "process": os.getpid(), "options": options}
    if name == "products":
        row = {"steps": steps, "flops": 1e9 * steps}
    print(json.dumps({**row, "seconds": seconds, "peak_bytes": 60 if own else 110}), flush=True)
"""


@pytest.fixture
def benchmark(script):
    return script("benchmark")


@pytest.fixture
def workers(script, tmp_path, monkeypatch):
    """Fake workers in a temporary folder."""
    path = tmp_path / "worker.py"
    path.write_text(FAKE_WORKER)
    monkeypatch.setattr(script("timing.turns"), "WORKERS", path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def works(script):
    """The benchmark's tables by name."""
    return {work.name: work for work in script("timing.works").WORKS}


def turn(variant, round_number, seconds, tokens=1000, slots=1000, examples=16, peak=200, imports=100):
    return {
        "kind": "turn", "work": "masked_lm", "variant": variant, "round": round_number, "steps": 1, "seconds": seconds,
        "tokens": tokens, "slots": slots, "examples": examples, "peak_bytes": peak, "imports_bytes": imports,
    }  # fmt: skip


@pytest.fixture
def rows():
    """Three rounds, the second on a machine half as fast, and an incomplete fourth round."""
    lines = [{"kind": "worker", "work": "masked_lm", "ready": "lmtool", "flops_per_token": 1e6}]
    for number, (slow, own) in enumerate([(1, 1.0), (2, 1.0), (1, 1.25)]):
        lines.append(turn("trainer_lines", number, 8.0 * slow, slots=2000, peak=400))
        lines.append(turn("trainer_packed", number, 4.0 * slow, tokens=2000, slots=2000, peak=500))
        lines += [turn(name, number, own * slow, peak=250) for name in ("lmtool_texts", "lmtool_tokens")]
        lines.append({**turn("products", number, slow), "flops": 2e9})
    return [*lines, turn("trainer_lines", 3, 1.0, slots=2000, peak=400)]


def test_ratios_compare_turns_of_the_same_round(script, works, rows):
    lines, packed, same_texts = script("timing.report").ratios(works["masked_lm"], rows)
    assert (lines.speed.median, lines.speed.smallest, lines.speed.largest, lines.rounds) == (8.0, 6.4, 8.0, 3)
    assert (packed.speed.median, packed.speed.smallest, packed.speed.largest) == (2.0, 1.6, 2.0)
    assert (lines.memory, packed.memory) == (250 / 400, 250 / 500)
    assert (lines.verdict, packed.verdict) == ("aim 8x reached", "aim 4x NOT reached")
    assert same_texts.comparison.own == "lmtool_texts" and same_texts.verdict == "no aim"


def test_fraction_of_product_speed_uses_the_same_round(script, works, rows):
    """1000 tokens of 1 MFLOP in a second (1.25 in the last round), relative to products at 2 GFLOP/s; the slow round
    slows both."""
    share = script("timing.report").shares(works["masked_lm"], rows, "lmtool_tokens")
    assert (share.median, share.smallest, share.largest) == pytest.approx((0.5, 0.4, 0.5))


def test_table_contains_speed_memory_and_aims(script, works, rows):
    table = script("timing.report").compose(works["masked_lm"], rows)
    padded = next(line for line in table.splitlines() if "padded to the longest" in line)
    assert "50%" in padded and "125" in padded  # half of the positions are padding; the median of 125, 62.5, 125, 1000
    assert "8.00x as fast (6.40 to 8.00 in 3 rounds; aim 8x reached)" in table and "0.62x, aim 0.7x reached" in table
    assert "are 50% (40% to 50%) of what the machine's own products do; aim 65% NOT reached" in table
    assert "at 1 to 2 GFLOP/s, so speeds of different rounds differ" in table


def test_report_warns_about_busy_machine(script, rows):
    report = script("timing.report")
    assert report.foreign_line(rows) is None
    rows += [{"kind": "finished", "work": "masked_lm", "foreign": 0.012}]
    assert report.foreign_line(rows).endswith("used 1.2% of the processors")
    rows += [{"kind": "finished", "work": "sst2", "foreign": 0.25}]
    assert report.foreign_line(rows).endswith("used 25.0% of the processors: do not trust the figures")


def test_foreign_seconds_exclude_this_process(script):
    before = script("common").foreign_seconds()
    if before is None:
        pytest.skip("needs /proc/stat")
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    machine = os.cpu_count() * 2  # upper bound on the others' seconds, if the half second took two
    assert -0.1 <= script("common").foreign_seconds() - before < machine


def check_row(loss, norm):
    return {
        "kind": "check", "work": "masked_lm", "own": "lmtool_texts", "rival": "trainer_lines", "loss": loss,
        "norm": norm, "rival_loss": 2.0, "rival_norm": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [(2.0001, 3.0, "the same step"), (2.001, 3.0, "ANOTHER STEP"), (2.0, 3.001, "ANOTHER STEP")],
)
def test_check_reports_different_step(script, works, rows, loss, norm, expected):
    (line,) = script("timing.report").checks(works["masked_lm"], [*rows, check_row(loss, norm)])
    assert expected in line and "the same examples in every turn" in line


@pytest.mark.parametrize(
    ("apart", "tolerance", "expected"),
    [
        (0, 0.0, "the same tokens (512, 0 differ)"),
        (3, 0.0, "OTHER RESULTS, tokens (512, 3 differ)"),
        (9e-6, 1e-5, "the same tokens (512, at most 9e-06 apart)"),
        (2e-5, 1e-5, "OTHER RESULTS, tokens (512, at most 2e-05 apart)"),
        (float("nan"), 1e-5, "OTHER RESULTS, tokens (512, at most nan apart)"),
    ],
)
def test_check_reports_different_results(script, apart, tolerance, expected):
    row = {"results": "tokens", "count": 512, "apart": apart, "tolerance": tolerance}
    assert script("timing.report").check_line(row) == expected


def test_check_reports_different_examples(script, works, rows):
    next(row for row in rows if row["kind"] == "turn")["tokens"] += 1
    (line,) = script("timing.report").checks(works["masked_lm"], [*rows, check_row(2.0, 3.0)])
    assert "NOT THE SAME EXAMPLES" in line


def test_table_without_rows_reports_not_measured(script, works):
    rows = [{"kind": "failed", "work": "sst2", "variant": "trainer_padded", "why": "out of paper"}]
    table = script("timing.report").compose(works["sst2"], rows)
    assert table.count("not measured") == len(works["sst2"].variants) and "not measured: out of paper" in table


def test_comparisons_name_existing_variants(works):
    for work in works.values():
        for comparison in work.comparisons:
            assert work.variant(comparison.own).own and not work.variant(comparison.rival).own
        assert {variant.name for variant in work.rivals} == {comparison.rival for comparison in work.comparisons}


def test_turn_order_alternates_with_lmtool_in_the_middle(script, works):
    order_of = script("timing.turns").order_of
    for work in works.values():
        there, back = order_of(work, 0), order_of(work, 1)
        seldom = [variant for variant in there if variant.every > 1]
        assert [variant for variant in there if variant not in seldom] == list(back[::-1])
        assert {variant.name for variant in there} == {variant.name for variant in work.variants}
        assert not there[0].own and not there[-1].own


SETTINGS = {"device": "cpu", "threads": 1, "turn_seconds": 5.0, "most_steps": 40}


def test_workers_take_turns_for_all_rounds(script, works, workers, tmp_path):
    rows: list = []
    work = works["sst2"]
    deadline = time.monotonic() + 60
    script("timing.turns").measure(work, tmp_path, SETTINGS | {"rounds": 3}, deadline, rows.append)
    assert json.loads(json.dumps(rows)) == rows
    for variant in work.variants:
        own = script("timing.report").turns(rows, variant.name)
        assert [row["round"] for row in own] == ([0, 2] if variant.every == 2 else [0, 1, 2])
        assert {row["steps"] for row in own} == {variant.steps or 5}
    table = script("timing.report").ratios(work, rows)
    assert {ratio.speed.median for ratio in table} == {4.0} and {ratio.memory for ratio in table} == {60 / 110}
    assert len(table) == len(work.comparisons)


def test_failed_rival_is_recorded(script, works, workers, tmp_path):
    settings, rows = SETTINGS | {"rounds": 1, "broken": "trainer_flattened"}, []
    script("timing.turns").measure(works["causal_lm"], tmp_path, settings, time.monotonic() + 60, rows.append)
    assert [row["variant"] for row in rows if row["kind"] == "failed"] == ["trainer_flattened"]


def test_shared_variants_of_a_side_take_turns_in_one_process(script, works, workers, tmp_path):
    work, rows = works["embed"], []
    script("timing.turns").measure(
        work, tmp_path, SETTINGS | {"rounds": 2}, time.monotonic() + 60, rows.append, required=False
    )
    turns = {variant.name: script("timing.report").turns(rows, variant.name) for variant in work.variants}
    for variant in work.variants:
        assert {row["steps"] for row in turns[variant.name]} == {variant.steps}
        assert [row["options"] for row in turns[variant.name]] == [dict(variant.options)] * 2
    for side in (work.own, work.rivals):
        assert len({row["process"] for variant in side for row in turns[variant.name]}) == 1
    assert len(list(tmp_path.glob("*.log"))) == 3


def test_failed_process_drops_all_its_variants(script, works, workers, tmp_path):
    settings, rows, work = SETTINGS | {"rounds": 1, "broken_at": 128}, [], works["embed"]
    script("timing.turns").measure(work, tmp_path, settings, time.monotonic() + 60, rows.append)
    assert {row["variant"]: row["why"] for row in rows if row["kind"] == "failed"} == {
        variant.name: f"{variant.name} ended: RuntimeError: out of ink" for variant in work.rivals
    }
    assert {row["variant"] for row in rows if row["kind"] == "turn"} == {
        v.name for v in (*work.own, script("timing.turns").MULTIPLY)
    }


def test_failed_lmtool_raises_error_with_log(script, works, workers, tmp_path):
    turns, settings = script("timing.turns"), SETTINGS | {"rounds": 1, "broken": "lmtool_joined"}
    with pytest.raises(turns.TimingError, match="out of paper") as caught:
        turns.measure(works["causal_lm"], tmp_path, settings, time.monotonic() + 60, [].append)
    assert caught.value.status == 1 and caught.value.hint == f"read {tmp_path / 'lmtool_joined.log'}"


def run(benchmark, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
    benchmark.main()


@pytest.fixture
def finished(benchmark, workers, monkeypatch, tmp_path, capsys):
    """The results file of two tables, and what was printed."""
    file = tmp_path / "rows.jsonl"
    run(benchmark, monkeypatch, "--quick", "--precision", "fp32", "--only", "squad,prediction", "--output", str(file))
    return file, capsys.readouterr().out


def test_resume_finishes_interrupted_benchmark(benchmark, finished, monkeypatch, capsys):
    def speeds(text):
        return [line for line in text.splitlines() if "as fast" in line]

    file, printed = finished
    assert "the same step" in printed and "4.00x as fast" in printed
    lines = file.read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if json.loads(line).get("round") == 1) + 2
    file.write_text("".join(lines[:last]) + lines[last][:20])  # ends within a line of the second round
    run(benchmark, monkeypatch, "--resume", str(file))
    assert speeds(capsys.readouterr().out) == speeds(printed)
    assert file.read_text().count('"kind": "check"') == "".join(lines).count('"kind": "check"')


def test_resume_of_finished_benchmark_measures_nothing(benchmark, finished, monkeypatch):
    file, _ = finished
    before = file.read_text()
    run(benchmark, monkeypatch, "--resume", str(file))
    assert file.read_text() == before


def test_benchmark_of_different_work_exits_with_3(benchmark, finished, monkeypatch, capsys):
    file, _ = finished
    file.write_text(file.read_text().replace('"rival_loss": 1.0', '"rival_loss": 1.1'))
    with pytest.raises(SystemExit) as caught:
        run(benchmark, monkeypatch, "--resume", str(file))
    assert caught.value.code == 3 and "error: not the same work: lmtool_finetune and" in capsys.readouterr().err


def test_benchmark_of_different_results_exits_with_3(benchmark, workers, monkeypatch, tmp_path, capsys):
    file = tmp_path / "uses.jsonl"
    run(benchmark, monkeypatch, "--quick", "--precision", "fp32", "--only", "embed,shots", "--output", str(file))
    assert "the same tokens (512, 0 differ)" in capsys.readouterr().out
    run(benchmark, monkeypatch, "--markdown", str(file))
    assert "The tokens, vectors or scores of both sides were the same in 6 of 6 comparisons" in capsys.readouterr().out
    file.write_text(file.read_text().replace('"apart": 0', '"apart": 1'))
    with pytest.raises(SystemExit) as caught:
        run(benchmark, monkeypatch, "--resume", str(file))
    assert caught.value.code == 3 and "OTHER RESULTS" in capsys.readouterr().err


def test_markdown_option_prints_table_of_a_file(benchmark, works, finished, monkeypatch, capsys):
    file, _ = finished
    before = file.read_text()
    monkeypatch.setattr(benchmark, "measure_all", lambda options: pytest.fail("measured again"))
    run(benchmark, monkeypatch, "--markdown", str(file))
    _, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == len(works["squad"].comparisons) + len(works["prediction"].comparisons)
    assert rows[-1].endswith("| 4.00 (4.00 to 4.00) | 2x reached | 0.55 |")
    assert file.read_text() == before


@pytest.mark.slow
def test_corpus_option_measures_memory(benchmark, monkeypatch, capsys):
    run(benchmark, monkeypatch, "--corpus", "1")
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["text", "MB", "command", "seconds", "peak", "MB"]
    assert [row[:2] for row in rows] == [["1", "pretrain"], ["1", "predict"], ["1", "embed"]]
    assert all(float(seconds) > 0 and 50 < float(peak) < 4000 for _, _, seconds, peak in rows)
    monkeypatch.setattr("timing.corpus.PRETRAIN", ("pretrain", "model=nothing"))
    with pytest.raises(SystemExit) as caught:
        run(benchmark, monkeypatch, "--corpus", "1")
    assert caught.value.code == 1 and "lmtool pretrain ended with status 2" in capsys.readouterr().err


def test_sizes_option_measures_published_sizes(benchmark, workers, monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    run(benchmark, monkeypatch, "--sizes", "base", "--precision", "fp32", "--output", str(file))
    screen = capsys.readouterr().out
    assert "H768 L12 heads 12 FF3072 V30522" in screen and "GPT-2 small (V50257)" in screen and "SST-2" not in screen
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[1]["only"] == ["masked_lm_base", "causal_lm_base"]
    assert {row["rounds"] for row in rows if row["kind"] == "round"} == {1, 2}
    assert sum(row["kind"] == "check" for row in rows) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "sst"], "--only sst: unknown name"),
        (["--only", "sst2", "--sizes", "base"], "--only names tables that --sizes base does not measure"),
        (["--resume", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["--resume", "other.jsonl", "--quick"], "--resume measures with the settings of its file"),
        (["--output", "empty.jsonl"], "--output empty.jsonl exists already"),
        (["--markdown", "empty.jsonl"], "empty.jsonl is not a results file"),
        (["--resume", "other.jsonl"], "other.jsonl was measured with torch 1.0, and here it is"),
    ],
)
def test_invalid_options_print_error_and_hint(benchmark, workers, monkeypatch, tmp_path, capsys, words, message):
    (tmp_path / "empty.jsonl").write_text("")
    machine = {**benchmark.describe_machine(), "torch": "1.0"}
    (tmp_path / "other.jsonl").write_text(json.dumps(machine) + '\n{"kind": "settings"}\n')
    with pytest.raises(SystemExit) as caught:
        run(benchmark, monkeypatch, *words)
    error, hint = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and error.startswith(f"error: {message}") and hint.startswith("hint: ")


def test_missing_transformers_prints_hint(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        run(benchmark, monkeypatch)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: not installed: transformers, accelerate, sentence_transformers",
        "hint: run make bench",
    ]


def test_machine_line_warns_about_load(script):
    machine_line = script("timing.report").machine_line
    machine = {"kind": "machine", "processor": "P", "cores": 2, "torch": "1", "transformers": "2", "lmtool": "3"}
    rates = {"kind": "examples", "work": "sst2", "gflops": {"fp32": 15.2, "bf16": 60.0}}
    quiet = machine_line([{**machine, "load_before": 0.1}, rates])
    assert "fp32 15, bf16 60 GFLOP/s" in quiet and "do not trust" not in quiet
    assert "do not trust" in machine_line([{**machine, "load_before": 3.0}])
