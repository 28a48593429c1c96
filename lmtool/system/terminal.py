"""Output to a terminal: secrets are masked, and control characters are escaped. Standard library only."""

from __future__ import annotations

import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from lmtool.system.secrets import masked, masker

# Cc control, Cf format (direction overrides, zero width), Cs lone surrogate, Zl/Zp line and paragraph separators.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACES = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
_RUN = re.compile(r"([␣⏎⇥␍])\1{3,}")

# A path has at most 4,096 characters, most names 255.
_LONG_WORD = re.compile(r"(?P<start>\S{300})\S{200,}")


def open_closed_streams() -> None:
    """Opens the null device in place of the standard streams that are closed (`>&-`, some schedulers). Otherwise the
    next files opened would get their descriptors, and whatever a library prints would be written into these files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Prints the lines of a text, masked and escaped. stream: None means standard output."""
    stream = sys.stdout if stream is None else stream
    mask = masker()
    lines = "".join(f"{visible(mask(line))}\n" for line in text.split("\n"))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(lines.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def say_error(message: str, hint: str | None = None) -> None:
    """Prints an error and a hint, one line each. Truncates words that are too long for a path."""
    for line in [f"error: {message}", *([f"hint: {hint}"] if hint else [])]:
        say(_LONG_WORD.sub(r"\g<start>...", safe_line(line)), sys.stderr)


def safe_line(text: str) -> str:
    """Makes a line safe to print: masks secrets, and escapes characters as `visible` does."""
    return visible(masked(text))


def shell_line(words: Iterable[str]) -> str:
    """Returns words as a line for a shell, with quotes where a word needs them."""
    return " ".join(
        f'"{word}"' if "'" in word and not set('"$`\\!') & set(word) else shlex.quote(word) for word in words
    )


def counted(number: int, noun: str) -> str:
    """Returns '1 job' or '1,234 jobs'."""
    return f"{number:,} {plural(number, noun)}"


def listing(names: Sequence[str], most: int) -> str:
    """Returns 'a, b, c and 4 more': at most `most` names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(number: float, noun: str) -> str:
    """Returns 'job' for 1, 'jobs' for any other number."""
    return noun if number == 1 else f"{noun}s"


def visible(text: str) -> str:
    """Escapes control and direction characters in a line. Otherwise an escape sequence in a data set, a file name or an
    override could recolor or erase the user's screen, and a line end could forge another line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def visible_space(text: str) -> str:
    """Makes white space visible: ␣ for a space, ⏎ for a line end, ␣×5 for five spaces."""
    return _RUN.sub(lambda run: f"{run[1]}×{len(run[0])}", text.translate(_SPACES))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE:
        return character
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
