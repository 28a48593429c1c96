"""The most similar name for a misspelled one. Standard library only, because `lmtool --help` uses it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 200
"""Maximum letters of a word that is compared, because the time grows with the product of both lengths."""


def distance(a: str, b: str) -> int:
    """Returns the edit distance: insertions, deletions, substitutions and swaps of two adjacent letters (Damerau
    1964)."""
    above: list[int] = []  # the row before the previous one
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
        above, previous = previous, row
    return previous[-1]


def _max_distance(word: str) -> int:
    """Returns the maximum edit distance for a suggestion."""
    return min(max(1, len(word) // 3), len(word) - 1)


def _differ_too_much(word: str, other: str) -> bool:
    """Whether two names differ too much in what follows the parts that they share: `bert_base` and `bert_cased`."""
    parts, other_parts = word.split("_"), other.split("_")
    while len(parts) > 1 and len(other_parts) > 1 and parts[0] == other_parts[0]:
        parts, other_parts = parts[1:], other_parts[1:]
    return distance("_".join(parts), "_".join(other_parts)) > _max_distance("_".join(parts))


def nearest(word: str, known: Iterable[object]) -> str | None:
    """Returns the known name that is most similar to `word`, or None if none is similar enough."""
    if len(word) > LONGEST:
        return None
    lower = word.lower()
    # Ties are broken in favor of the same letters: `adawm` is adamw.
    ranked = sorted(
        (distance(lower, name.lower()), sorted(lower) != sorted(name.lower()), name) for name in map(str, known)
    )
    if ranked and ranked[0][0] <= _max_distance(word) and not _differ_too_much(lower, ranked[0][2].lower()):
        return ranked[0][2]
    extensions = [
        name for *_, name in ranked if len(word) > 2 and (name.startswith(word) or word.startswith(name + "_"))
    ]
    return extensions[0] if extensions else None


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Returns at most three dotted keys that are most similar to a misspelled one, best first.

    The last part decides (`lr` finds `optimizer.lr`). A different section costs half an edit if it is a typo itself,
    one edit if it is missing or another word.
    """
    if len(key) > LONGEST:
        return []
    parent, _, last = key.rpartition(".")
    scored = []
    for candidate in known:
        above, _, name = candidate.rpartition(".")
        edits = distance(last.lower(), name.lower())
        section_edits = 0.0 if above == parent else min(1.0, distance(parent, above) / 2)
        # In the same section a larger distance is allowed; in another one only a single edit.
        if edits <= (_max_distance(last) if above == parent else min(1, _max_distance(last))) or edits == 0:
            scored.append((edits + section_edits, candidate))
    scored.sort()
    return [candidate for score, candidate in scored if score == scored[0][0]][:3] or _by_rare_part(last.lower(), known)


def _by_rare_part(word: str, known: Sequence[str]) -> list[str]:
    """Returns the keys that have a part of the word, the part that the fewest keys have: `num_epochs` finds
    `max_epochs`. Empty if more than three keys have it."""
    keys_by_part: dict[str, list[str]] = {}
    for key in known:
        for part in {*key.rpartition(".")[2].split("_")} & {*word.split("_")}:
            keys_by_part.setdefault(part, []).append(key)
    fewest = min(keys_by_part.values(), key=len, default=[])
    return fewest if len(fewest) <= 3 else []
