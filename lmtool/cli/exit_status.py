"""Reports the error of a failed command and determines its exit status. In distributed training every rank ends here;
identical errors are printed once, and errors caused by the end of another rank are not printed."""

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
_RERUN_HINT = "start it again: it continues from its last checkpoint"


def current_rank() -> RankInfo:
    """The rank of this process. An invalid environment is reported elsewhere."""
    try:
        return rank_info(os.environ)
    except UserError:
        return RankInfo()


def failed(error: BaseException, debug: bool) -> int:
    """Reports the error of a command and returns its exit status. debug: also print the traceback of a user error."""
    ends = Ends.local(current_rank())
    known = _known(error)
    if known is None:
        return _unexpected(error, ends)
    if debug:
        _traceback()
    lines = tuple(line for pair in _messages(known) for line in pair if line is not None)
    prefix = ends.last_words(known.exit_status, lines)
    if prefix is not None:
        with suppress(OSError):  # the terminal may be gone, as after SIGHUP
            for message, hint in _messages(known):
                say_error(f"{prefix}{message}", hint)
    return known.exit_status


def _known(error: BaseException) -> LmtoolError | None:
    """The error as one that the user can fix; None for any other."""
    if isinstance(error, LmtoolError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return stopped(error)
    return errors.out_of_memory(error)


def _messages(error: LmtoolError) -> list[tuple[str, str | None]]:
    """(message, hint) of an error, or of each error in a configuration."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    return [(problem.message, problem.hint) for problem in problems] or [(error.message, error.hint)]


def _unexpected(error: BaseException, ends: Ends) -> int:
    """Reports a bug, or the loss of the connection to another rank."""
    waited = isinstance(error, RuntimeError) and "timed out" in str(error).lower()
    prefix = ends.last_traceback(errors.FAULT, (f"{type(error).__name__}: {error}",))
    if prefix is None:
        return errors.FAULT
    connection_error = _connection_error(error, waited, ends) if ends.process.size > 1 else None
    if connection_error is not None:
        say_error(connection_error, _RERUN_HINT)
        return errors.FAULT
    _traceback()
    say_error(f"{prefix}{REPORT_TO}")
    return errors.FAULT


def _connection_error(error: BaseException, waited: bool, ends: Ends) -> str | None:
    """The message if another rank does not answer; None for other errors. waited: whether a timeout expired."""
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
