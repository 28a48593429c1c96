"""The output of a run: standard output and log.txt. Masks secrets and escapes control characters.

A terminal gets colored lines and a progress bar; a file or pipe gets plain lines without carriage returns or escape
sequences. A closed pipe (`lmtool pretrain | head`) or terminal never stops a training.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, ClassVar, TextIO

from lmtool.reporting.text import cells, clock, duration, is_number, is_numeric, number, plain, wrap
from lmtool.system.secrets import masked
from lmtool.system.terminal import safe_line

# Minimum seconds between two plain lines, and between two drawings of the bar.
_LINE_SECONDS, _REDRAW_SECONDS = 30.0, 0.1
_BAR_CELLS = 24


class StageProgress:
    """The progress of one stage at a time.

    draw: replaces the text of the bar, or clears the bar if the text is None; None without a terminal. line: writes a
    line. now: a clock in seconds.
    """

    def __init__(
        self,
        draw: Callable[[str | None], None] | None,
        line: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self._draw, self._line, self._now = draw, line, now
        self._stage: str | None = None
        self._start_time = self._last_shown = 0.0
        self._first_done = 0

    def show(self, stage: str, done: int, total: int, rate: str) -> None:
        """Shows that `done` of `total` units are finished. rate: the speed as text."""
        now = self._now()
        if stage != self._stage:
            self._stage, self._start_time, self._last_shown, self._first_done = stage, now, now, done
        seconds_left = (
            (now - self._start_time) * (total - done) / max(done - self._first_done, 1)
            if done > self._first_done
            else float("nan")
        )
        if self._draw is None:
            if now - self._last_shown >= _LINE_SECONDS and done < total:
                self._last_shown = now
                self._line(f"{stage}: {done / total:.0%}, {rate}, about {duration(seconds_left)} left")
        elif done >= total:
            self._draw(None)
        elif now - self._last_shown >= _REDRAW_SECONDS or done == self._first_done:
            self._last_shown = now
            filled = round(_BAR_CELLS * done / total)
            columns = shutil.get_terminal_size((100, 24)).columns
            blocks = f"{'#' * filled:.<{_BAR_CELLS}}"
            bar = f"{stage} [{blocks}] {done / total:4.0%} · {rate} · {clock(seconds_left)} left"
            self._draw(bar[: columns - 1])


if TYPE_CHECKING:
    from rich.console import Console

# Replacements for a terminal that cannot show these characters.
_ASCII = str.maketrans({"★": "*", "·": "|", "…": "...", "±": "+-", "×": "x", "→": "->", "−": "-", "—": "-"})


class SafeStream:
    """A text stream whose reader may close it: writing never raises, and later output is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.closed = False

    @property
    def encoding(self) -> str:
        return self.stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        if self.closed:
            return len(text)
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            shown_text = text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
            return self.write(shown_text)
        except (OSError, ValueError):
            self._drop_output()
        return len(text)

    def flush(self) -> None:
        if self.closed:
            return
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self._drop_output()

    def _drop_output(self) -> None:
        """Drops all further output: after EPIPE, EIO of a closed terminal, a full disk or a closed file."""
        self.closed = True
        if self.stream is not sys.stdout:
            return
        try:
            # Buffered output would fail again when Python flushes at exit, and turn exit status 0 into 120.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):
            sys.stdout = None  # a stream without a descriptor: nothing to flush


class Output:
    """Writes lines to a stream, and the same lines without styles to a log file.

    stream: None for standard output. log: receives each plain line; None for no log file. live: whether the stream is
    a terminal that can show styles and a bar. brief: whether outputs with a log file write only warnings to their
    streams.
    """

    brief: ClassVar[bool] = False

    def __init__(self, stream: TextIO | None = None, log: Callable[[str], object] | None = None):
        self.stream = SafeStream(stream if stream is not None else sys.stdout)
        self._log = log
        self.live = self.stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._console: Console | None = None
        self._stages: set[str] = set()
        self._progress = StageProgress(self._draw if self.live else None, self.line)
        self._bar_is_drawn = False

    @property
    def console(self) -> Console:
        """The rich console, created at first use so that plain output never imports rich."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True)  # type: ignore[arg-type]
        return self._console

    def line(self, text: str = "", style: str | None = None) -> None:
        """Writes one line; control characters in the text are escaped."""
        text = safe_line(text)
        if self._bar_is_drawn:
            self._draw(None)
        if self._is_hidden(text):
            self._write_log(text)
            return
        if self.live:
            from rich.text import Text

            self.console.print(Text(text, style=style or ""))
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
        self._write_log(text)

    def warn(self, text: str) -> None:
        """Writes a warning on one line."""
        self.line(f"warning: {text}", "yellow")

    def _is_hidden(self, text: str) -> bool:
        return Output.brief and self._log is not None and not text.startswith("warning: ")

    def log(self, text: str) -> None:
        """Writes one line to the log file only."""
        self._write_log(safe_line(text))

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log(text)
        except (OSError, ValueError) as failure:
            self._log = None
            self.warn(f"the log file cannot be written any more ({failure})")

    def stage(self, stage: str, done: int, total: int, rate: str = "", /) -> None:
        """Announces a long preparation once; with a rate, also shows its progress."""
        if stage not in self._stages:
            self._stages.add(stage)
            self.line(f"{stage} …")
        if rate:
            self._progress.show(stage, done, total, rate)

    def _draw(self, text: str | None) -> None:
        self.stream.write(f"\r\x1b[2K{safe_line(text or '')}\r")
        self.stream.flush()
        self._bar_is_drawn = text is not None

    @contextmanager
    def bar(self, stage: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a function that takes (done, total): a bar on a terminal, one line elsewhere."""
        if not self.live:
            yield partial(self.stage, stage)
            return
        from rich.progress import Progress

        with Progress(console=self.console, transient=True) as progress:
            task = progress.add_task(safe_line(stage), total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def counting_bar(self, stage: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields a function that counts one more of `total` on a bar."""
        with self.bar(stage) as bar:
            done = count(1)
            bar(0, total)
            yield lambda: bar(next(done), total)

    @property
    def columns(self) -> int:
        """Terminal width in cells; 100 if unknown."""
        return shutil.get_terminal_size((100, 24)).columns

    def paragraph(self, text: str, style: str | None = None) -> None:
        """Writes a text wrapped to the terminal's width; continuation lines are indented."""
        for index, line in enumerate(wrap(safe_line(text), max(self.columns, 30) - 2)):
            self.line(f"{'  ' if index else ''}{line}", style)

    def rows(self, rows: Iterable[tuple[str, str]], highlights: Mapping[str, str] | None = None) -> None:
        """Writes (label, text) rows with aligned labels; long texts are wrapped on a terminal.

        highlights: style by regular expression, on a terminal. Rows with highlights are wrapped everywhere.
        """
        rows = [(safe_line(label), safe_line(text)) for label, text in rows]
        indent = max((cells(label) for label, _ in rows), default=0) + 3
        width = max(self.columns, indent + 30) if self.live or highlights is not None else 10**6
        for label, text in rows:
            for index, line in enumerate(wrap(text, width - indent)):
                shown_label = label if index == 0 else ""
                padded_label = f" {shown_label}{' ' * (indent - 1 - cells(shown_label))}"
                if self._is_hidden(line):
                    pass
                elif self.live:
                    self._styled_row(padded_label, line, highlights or {})
                else:
                    self.stream.write(f"{padded_label}{line}".rstrip() + "\n")
                self._write_log(f"{padded_label}{line}".rstrip())
        self.stream.flush()

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], best: int | None = None
    ) -> None:
        """Prints a rich table. right: whether each column is right-aligned. best: index of the row to highlight."""
        if self._is_hidden(""):
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        rich_table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
        for name, to_right in zip(header, right, strict=True):
            rich_table.add_column(Text(safe_line(name)), justify="right" if to_right else "left")
        for index, row in enumerate(rows):
            rich_table.add_row(*(Text(safe_line(cell)) for cell in row), style="bold green" if index == best else "")
        self.console.print(rich_table)

    def _styled_row(self, label: str, text: str, highlights: Mapping[str, str]) -> None:
        from rich.text import Text

        styled_text = Text(text, style="not dim")
        for pattern, style in highlights.items():
            styled_text.highlight_regex(pattern, style)
        self.console.print(Text(label, style="dim").append_text(styled_text))


_CELL_CHARACTERS = 120
_MIN_FIRST_COLUMN = 16


def cell(value: object) -> str:
    """Returns a value as the text of a table cell: None is empty, numbers are rounded, text is escaped and masked."""
    if value is None:
        return ""
    if is_number(value):
        return number(value)
    return plain(masked(str(value)), _CELL_CHARACTERS)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[object]], columns: int | None = None) -> list[str]:
    """Returns the table as plain lines: header, rule, rows; numbers are right-aligned.

    columns: maximum width in cells, reached by wrapping the first column; None for no limit.
    """
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[index]) for row in texts)]) for index, name in enumerate(header)]
    if columns is not None:
        widths[0] = min(widths[0], max(columns - sum(widths[1:]) - 2 * len(widths[1:]), _MIN_FIRST_COLUMN))
    right = [is_numeric([row[index] for row in rows]) for index in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return [
        line([plain(name, _CELL_CHARACTERS) for name in header]),
        "  ".join("-" * width for width in widths),
        *(line(wrapped) for row in texts for wrapped in _wrapped_row(row, widths[0])),
    ]


def _wrapped_row(row: Sequence[str], width: int) -> list[list[str]]:
    first, *other_cells = row
    if len(first) <= width:
        return [list(row)]
    first_line, *other_lines = wrap(first, width)
    other_lines = wrap(" ".join(other_lines), width - 2)
    return [[first_line, *other_cells], *([f"  {text}", *[""] * len(other_cells)] for text in other_lines)]


def latex_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in LaTeX, with the rules of the package booktabs; numbers are right-aligned."""
    columns = "".join("r" if is_numeric([row[index] for row in rows]) else "l" for index in range(len(header)))
    head, *lines = (" & ".join(latex_text(cell(value)) for value in row) + r" \\" for row in (header, *rows))
    table = [r"\begin{tabular}{" + columns + "}", r"\toprule", head, r"\midrule", *lines]
    return "\n".join([*table, r"\bottomrule", r"\end{tabular}"])


def latex_text(text: str) -> str:
    """Returns the text with the characters escaped that have a meaning in LaTeX."""
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escaped = re.sub(r"[\\{}&%$#_~^]", lambda match: named.get(match[0], "\\" + match[0]), text)
    return escaped.replace("±", r"$\pm$")


def csv_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table as comma-separated values, with all digits of the numbers."""
    text = io.StringIO()
    values = [[value if is_number(value) else cell(value) for value in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows([header, *values])
    return text.getvalue().removesuffix("\n")


TABLE_FORMATS = {"latex": latex_table, "csv": csv_table}
"""Tables for other programs, by format."""
FIGURE_FORMATS = ("svg", "pdf")
"""The formats of figures for a paper; runs and sweeps also have them as PNG."""


def print_table(
    output: Output,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    heading: str | None = None,
    best: int | None = None,
) -> None:
    """Prints a table with an optional heading. best: index of the row to highlight."""
    if heading:
        output.line(heading, "bold")
    lines = table_lines(header, rows)
    if not output.live:
        for line in lines:
            output.line(line)
        return
    right = [is_numeric([row[index] for row in rows]) for index in range(len(header))]
    output.table(
        [plain(name, _CELL_CHARACTERS) for name in header],
        [[cell(value) for value in row] for row in rows],
        right,
        best,
    )
    for line in lines:
        output.log(line)
