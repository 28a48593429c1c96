"""The one door to a terminal: secrets are masked, and text from outside cannot command it. Standard library only."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from lmtool.system.secrets import masked, masker

# Cc control, Cf format (direction overrides, zero width), Cs lone surrogate, Zl/Zp line and paragraph separators.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACES = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
_RUN = re.compile(r"([␣⏎⇥␍])\1{3,}")


# A path has 4,096 characters at most, most names 255.
_LONG = re.compile(r"(?P<start>\S{300})\S{200,}")


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print the lines of a text of ours, each as `shown`. stream: None: standard output."""
    stream = sys.stdout if stream is None else stream
    mask = masker()
    lines = "".join(f"{visible(mask(line))}\n" for line in text.split("\n"))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(lines.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def say_error(message: str, hint: str | None = None) -> None:
    """Print a user's error: a line for what is wrong, and one for what to do. Each is one line, whatever is in it, and
    what is too long for a name or a path stands in it by its beginning."""
    for line in [f"error: {message}", *([f"hint: {hint}"] if hint else [])]:
        say(_LONG.sub(r"\g<start>...", shown(line)), sys.stderr)


def shown(text: str) -> str:
    """One line as it may be printed: masked, and `visible`."""
    return visible(masked(text))


def counted(number: int, noun: str) -> str:
    """'1 job', '1,234 jobs'."""
    return f"{number:,} {plural(number, noun)}"


def listing(names: Sequence[str], most: int) -> str:
    """'a, b, c and 4 more': at most `most` names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(number: float, noun: str) -> str:
    """'job' of one, 'jobs' of any other number."""
    return noun if number == 1 else f"{noun}s"


def visible(text: str) -> str:
    """One line: control and direction characters become visible escapes, everything else stays.

    An escape sequence in a data set, a file name or an override could otherwise recolour or erase the user's screen,
    and a line end in one could forge a line of its own.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def visible_space(text: str) -> str:
    """White space as something to see: a space as ␣, a line end as ⏎; more than three of one with their number."""
    return _RUN.sub(lambda run: f"{run[1]}×{len(run[0])}", text.translate(_SPACES))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE:
        return character
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
