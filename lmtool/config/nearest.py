"""The nearest right name for a misspelt one. Standard library only: `lmtool --help` reads it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 200
"""Letters beyond which a word is like no name: the time to compare two words grows with the product of both."""


def distance(a: str, b: str) -> int:
    """Edits from one word to the other: add, drop, change a letter, or swap two neighbours (Damerau 1964)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _far(word: str) -> int:
    """Edits beyond which two words are strangers."""
    return min(max(1, len(word) // 3), len(word) - 1)


def _strangers(word: str, other: str) -> bool:
    """Whether two words are strangers behind the parts (`bert_`) that they begin with alike: `base` and `cased`."""
    ours, theirs = word.split("_"), other.split("_")
    while len(ours) > 1 and len(theirs) > 1 and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    return distance("_".join(ours), "_".join(theirs)) > _far("_".join(ours))


def nearest(word: str, known: Iterable[object]) -> str | None:
    """The known word most like `word`, or None where nothing is close."""
    if len(word) > LONGEST:
        return None
    lower = word.lower()
    # Of two as near, that of the same letters: `adawm` is adamw.
    ranked = sorted(
        (distance(lower, name.lower()), sorted(lower) != sorted(name.lower()), name) for name in map(str, known)
    )
    if ranked and ranked[0][0] <= _far(word) and not _strangers(lower, ranked[0][2].lower()):
        return ranked[0][2]
    inside = [name for *_, name in ranked if len(word) > 2 and (name.startswith(word) or word.startswith(name + "_"))]
    return inside[0] if inside else None


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """The dotted keys most like a misspelt one, at most three, best first.

    The last part decides (`lr` finds `optimizer.lr`); another section counts half an edit where it is itself a typo,
    one where it is missing or another word.
    """
    if len(key) > LONGEST:
        return []
    parent, _, last = key.rpartition(".")
    scored = []
    for candidate in known:
        above, _, name = candidate.rpartition(".")
        edits = distance(last.lower(), name.lower())
        elsewhere = 0.0 if above == parent else min(1.0, distance(parent, above) / 2)
        # In its own section a word may be far from the right one; in another only a slip.
        if edits <= (_far(last) if above == parent else min(1, _far(last))) or edits == 0:
            scored.append((edits + elsewhere, candidate))
    scored.sort()
    return [candidate for score, candidate in scored if score == scored[0][0]][:3] or _sharing(last.lower(), known)


def _sharing(word: str, known: Sequence[str]) -> list[str]:
    """The keys that share a part of the word, the part that the fewest of them have: `num_epochs` finds `max_epochs`.
    None where more than three do."""
    sharing: dict[str, list[str]] = {}
    for key in known:
        for part in {*key.rpartition(".")[2].split("_")} & {*word.split("_")}:
            sharing.setdefault(part, []).append(key)
    fewest = min(sharing.values(), key=len, default=[])
    return fewest if len(fewest) <= 3 else []
