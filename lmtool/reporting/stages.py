"""How far a long preparation is: on a terminal a bar on one line, elsewhere a line now and then."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from lmtool.reporting.text import clock, duration

_EVERY_SECONDS = 30.0  # between plain lines
_BAR, _REDRAWN_SECONDS = 24, 0.1


class StageProgress:
    """One stage at a time. draw: puts a text where the last one stood, None takes it away; None: no terminal. line:
    writes a line. now: seconds of a clock."""

    def __init__(
        self,
        draw: Callable[[str | None], None] | None,
        line: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self._draw, self._line, self._now = draw, line, now
        self._stage: str | None = None
        self._began = self._shown = 0.0
        self._first = 0

    def show(self, stage: str, done: int, total: int, rate: str) -> None:
        """done of total are done, at a rate in words."""
        now = self._now()
        if stage != self._stage:
            self._stage, self._began, self._shown, self._first = stage, now, now, done
        left = (now - self._began) * (total - done) / max(done - self._first, 1) if done > self._first else float("nan")
        if self._draw is None:
            if now - self._shown >= _EVERY_SECONDS and done < total:
                self._shown = now
                self._line(f"{stage}: {done / total:.0%}, {rate}, about {duration(left)} left")
        elif done >= total:
            self._draw(None)
        elif now - self._shown >= _REDRAWN_SECONDS or done == self._first:
            self._shown = now
            filled = round(_BAR * done / total)
            columns = shutil.get_terminal_size((100, 24)).columns
            bar = f"{stage} [{'#' * filled}{'.' * (_BAR - filled)}] {done / total:4.0%} · {rate} · {clock(left)} left"
            self._draw(bar[: columns - 1])
