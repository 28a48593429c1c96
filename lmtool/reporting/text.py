"""Formats numbers and names for people, and escapes foreign text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard

from lmtool.system.secrets import masked
from lmtool.system.terminal import visible


def cells(text: str) -> int:
    """Returns the width of a text in terminal cells: two for a wide character, none for a combining accent."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imported late: a command that is refused prints ASCII

    return cell_len(text)


def wrap(text: str, width: int) -> list[str]:
    """Wraps a text to lines of at most `width` cells; returns at least one line, which may be empty."""
    if 2 * len(text) <= width:
        return [text.rstrip()]
    from rich.cells import cell_len, chop_cells

    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += chop_cells(word, width) or [""]
    return [line.rstrip() for line in lines if line.strip()] or [""]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_numeric(column: Iterable[object]) -> bool:
    """Whether a column of a table has numbers only, apart from empty cells."""
    values = [value for value in column if value not in (None, "")]
    return bool(values) and all(map(is_number, values))


def lower_is_better(metric: str) -> bool:
    """Whether smaller values of the metric are better (losses, errors, perplexity)."""
    # Imported late: metrics need numpy, and a screen without scores should not wait for it.
    from lmtool.learners.metrics import smaller_is_better

    return smaller_is_better(metric)


def plain(text: object, limit: int | None = None) -> str:
    """Returns text on one line, with control and direction characters escaped.

    limit: maximum number of characters. Secrets are masked before cutting, since half a secret is not recognized.
    """
    text = str(text)
    if limit is not None and len(text) > limit:
        text = masked(text)
        text = text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"
    return visible(text)


def shorten(names: Iterable[object], limit: int) -> list[str]:
    """Returns the names, each with its middle elided if it is longer than `limit` characters. Different names stay
    different: they keep as many more characters as needed."""
    texts = [plain(masked(str(name))) for name in names]
    limits = [limit] * len(texts)
    while True:
        candidates = [_without_middle(text, maximum) for text, maximum in zip(texts, limits, strict=True)]
        texts_by_short: dict[str, set[str]] = {}
        for shortened, text in zip(candidates, texts, strict=True):
            texts_by_short.setdefault(shortened, set()).add(text)
        ambiguous = [index for index, shortened in enumerate(candidates) if len(texts_by_short[shortened]) > 1]
        if not ambiguous:
            return candidates
        for index in ambiguous:
            limits[index] += 4


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    end = (limit - 1) // 2
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def _scale(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.3g}{unit}"
    return f"{value:.3g}"


def count(value: float) -> str:
    """Formats 1234 as '1,234', and 4_400_000 as '4.4 M'."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 100_000:
        return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return _scale(value, ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")))


def flops(value: float) -> str:
    """Formats 5.45e8 as '545 MFLOP'."""
    units = tuple(
        (10.0**power, f" {unit}FLOP") for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"))
    )
    return _scale(value, (*units, (1.0, " FLOP")))


def size(value: float) -> str:
    """Formats bytes: 17_500_000 as '17.5 MB'."""
    return _scale(value, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " B"))) if value else "0 B"


def duration(seconds: float) -> str:
    """Formats seconds: 18.2 as '18.2 s', 200 as '3 min 20 s', 9000 as '2 h 30 min', 200_000 as '2 d 7 h'."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 20 else f"{seconds:.0f} s"
    total = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if total >= large:
            return f"{total // large} {names[0]} {total % large // small} {names[1]}"
    return f"{total} s"


def clock(seconds: float) -> str:
    """Formats seconds as 0:09, 3:20 or 2:30:00."""
    if not math.isfinite(seconds):
        return "-:--"
    total = max(round(seconds), 0)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


def number(value: float) -> str:
    """Formats a score or loss with about four significant digits, and an exponent only if a decimal is unreadable."""
    if not is_number(value):
        return plain(value, 200)
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return count(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 10_000 else count(value)


def exponent(value: float) -> str:
    """Formats a learning rate: 0.00045 as '4.5e-4'."""
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}" if value else "0"


def percent(fraction: float) -> str:
    """Formats a fraction: 0.153 as '15.3%', 0.00012 as '0.012%', 1.48e-9 as '< 0.001%'."""
    if 0.0005 <= abs(fraction) <= 0.9995 or fraction in (0, 1):
        return f"{100 * fraction:.1f}%".replace(".0%", "%")
    if abs(fraction) < 0.00001:
        return "< 0.001%" if fraction > 0 else "> -0.001%"
    return f"{100 * fraction:.3g}%"


def tenths(fraction: float) -> str:
    """Formats a fraction with one decimal, for columns: 0.65 as '65.0%', 0.0002 as '< 0.1%'."""
    return "< 0.1%" if 0 < fraction < 0.0005 else f"{fraction:.1%}"


def format_value(key: str, value: object) -> str:
    """Formats a value by the suffix of its key (`_bytes`, `bytes_per_second`, `seconds`, `_fraction`, ...); also lists
    and mappings of values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, (int, float)):
        if key.endswith("bytes"):
            return size(value)
        if key.endswith("bytes_per_second"):
            return f"{size(value)}/s"
        if key.endswith("seconds"):
            return duration(value)
        if key.endswith(("fraction", "share")):
            return percent(value)
        if key.endswith("flops"):
            return flops(value)
        if key in ("seed", "step", "epoch", "year"):
            return str(value)
        text = number(value)
        return text.rstrip("0").rstrip(".") if isinstance(value, float) and "." in text and text[-1] == "0" else text
    if isinstance(value, dict):
        items = zip(shorten(value, 60), value.items(), strict=True)
        return ", ".join(f"{label} {format_value(str(name), item)}" for label, (name, item) in items)
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(key, item) for item in value)
    return plain(value, 500)


def title(key: str) -> str:
    """Returns a key as words: 'mean_length' -> 'mean length'."""
    return plain(key, 80).replace("_", " ")
