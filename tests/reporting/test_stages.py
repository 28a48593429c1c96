"""Progress of long preparations: a bar on a terminal, otherwise a line every 30 seconds."""

from __future__ import annotations

import io

from lmtool.reporting.console import Output, StageProgress


def test_stage_progress_without_terminal_prints_lines():
    times, lines = iter([0.0, 10.0, 40.0, 50.0, 80.0]), []
    progress = StageProgress(None, lines.append, lambda: next(times))
    for done in (0, 10, 40, 50, 100):
        progress.show("tokenizing train", done, 100, "2.00 MB/s")
    assert lines == ["tokenizing train: 40%, 2.00 MB/s, about 1 min 0 s left"]


def test_stage_progress_on_terminal_redraws_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    times, drawn = iter([0.0, 0.01, 10.0, 20.0, 21.0]), []
    progress = StageProgress(drawn.append, drawn.append, lambda: next(times))
    for done in (0, 1, 50, 100):
        progress.show("tokenizing train", done, 100, "2.00 MB/s")
    assert len(drawn) == 3 and drawn[-1] is None
    assert drawn[1] == f"tokenizing train [{'#' * 12}{'.' * 12}]  50% · 2.00 MB/s · 0:10 left"
    monkeypatch.setenv("COLUMNS", "30")
    progress.show("tokenizing validation", 0, 1, "")
    assert len(drawn[-1]) == 29


def test_line_replaces_bar():
    stream = io.StringIO()
    output = Output(stream)
    output._draw("half")
    output.line("a warning")
    assert stream.getvalue() == "\r\x1b[2Khalf\r\r\x1b[2K\ra warning\n"
