"""How a command that fails ends: its error on the screen, and its exit status. Of several processes that train together
each ends here; what is the same in all is printed once, and what follows from the end of another not at all."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from lmtool import errors
from lmtool.errors import ConfigError, LmtoolError, UserError
from lmtool.system.ranks import Ends, RankInfo, rank_info
from lmtool.system.signals import stopped
from lmtool.system.terminal import say, say_error

REPORT_TO = "this is a bug in lmtool: please report it, with the lines above and what you typed"
_AGAIN = "start it again: it continues from its last checkpoint"


def place() -> RankInfo:
    """This process among those that were started together. What is wrong with that is reported where it matters."""
    try:
        return rank_info(os.environ)
    except UserError:
        return RankInfo()


def failed(error: BaseException, debug: bool) -> int:
    """Report what ended a command. Returns its exit status. debug: with the traceback of an error of lmtool's own."""
    ends = Ends.here(place())
    known = _known(error)
    if known is None:
        return _unexpected(error, ends)
    if debug:
        _traceback()
    lines = tuple(line for pair in _messages(known) for line in pair if line is not None)
    who = ends.last_words(known.exit_status, lines)
    if who is not None:
        with suppress(OSError):  # the terminal may be gone, as after SIGHUP
            for message, hint in _messages(known):
                say_error(f"{who}{message}", hint)
    return known.exit_status


def _known(error: BaseException) -> LmtoolError | None:
    """An error as one that a user can do something about; None for any other."""
    if isinstance(error, LmtoolError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return stopped(error)
    return errors.out_of_memory(error)


def _messages(error: LmtoolError) -> list[tuple[str, str | None]]:
    """What is wrong and what to do; of a configuration, of each error in it."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    return [(problem.message, problem.hint) for problem in problems] or [(error.message, error.hint)]


def _unexpected(error: BaseException, ends: Ends) -> int:
    """The end of a command by a bug, or of one of several processes by the end of another."""
    waited = isinstance(error, RuntimeError) and "timed out" in str(error).lower()
    who = ends.last_traceback(errors.FAULT, (f"{type(error).__name__}: {error}",))
    if who is None:
        return errors.FAULT
    lost = _lost(error, waited, ends) if ends.process.size > 1 else None
    if lost is not None:
        say_error(lost, _AGAIN)
        return errors.FAULT
    _traceback()
    say_error(f"{who}{REPORT_TO}")
    return errors.FAULT


def _lost(error: BaseException, waited: bool, ends: Ends) -> str | None:
    """What is said where a process ends because another one does not answer; None where that is not the reason.
    waited: as long as it may."""
    if waited:
        from lmtool.training.group import TIMEOUT

        silent = " and ".join(f"rank {rank}" for rank in ends.silent()) or "a rank on another machine"
        return f"{silent} did not answer for {TIMEOUT.total_seconds():g} seconds: it hangs, or is far behind"
    if isinstance(error, RuntimeError) and "onnection" in str(error):
        return f"rank {ends.process.rank}: the connection to another rank was lost: {str(error).splitlines()[0]}"
    return None


def _traceback() -> None:
    import traceback

    say(traceback.format_exc().rstrip(), sys.stderr)
