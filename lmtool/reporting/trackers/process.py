"""The process of one tracker: reads what happens in the run from its standard input, a JSON line each, until the run
ends or is gone. `python -m lmtool.reporting.trackers.process` is started by tracking.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from lmtool.config import plugins
from lmtool.config.tables import build, lookup
from lmtool.reporting.trackers import configs as configs
from lmtool.reporting.trackers.base import RunMetadata, Tracker
from lmtool.system.signals import STATUS

GROUP = "logger"


def main() -> None:
    # Output of the library is dropped: only answers go to the run.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    for number in STATUS:
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends; where that is gone, its pipe ends
    messages = iter(sys.stdin.readline, "")
    try:
        tracker = open_tracker(json.loads(next(messages)))
        serve(tracker, messages, answers)
    # The run reports any exception of a tracker in one line, and continues.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        say(answers, "failed", f"{type(error).__name__}: {' '.join(lines[:3])[:300]}")
    os._exit(0)  # without waiting for what a library registered to be done at exit


def open_tracker(start: dict[str, Any]) -> Tracker:
    """The tracker that the first line asks for."""
    plugins.load(start["plugins"])
    entry = lookup(GROUP, start["name"])
    assert entry is not None, start["name"]
    config = entry.config.model_validate_json(json.dumps(start["config"]))
    tracker: Tracker = build(config, RunMetadata(**start["run"]))
    return tracker


def serve(tracker: Tracker, lines: Iterable[str], answers: TextIO) -> None:
    """Feed a tracker until the line that ends it, or until there are no more: the run was killed."""
    say(answers, "ready", tracker.begin())
    result = None
    for line in lines:
        message = json.loads(line)
        if "row" not in message:
            result = message["end"]
            break
        tracker.write(message["row"])
    say(answers, "done", tracker.end(result))


def say(answers: TextIO, kind: str, text: str | None) -> None:
    """An answer to the run; where it is gone, nobody needs it."""
    try:
        answers.write(json.dumps({"kind": kind, "text": text}) + "\n")
        answers.flush()
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    main()
