"""Tags of entities and chunks in the schemes that files have, as BIO.

bio (IOB2): B begins an entity, I continues it. iob1: I, and B only where an entity of the same type ends right before
(Ramshaw and Marcus 1995; CoNLL-2003 as distributed). iobes: as bio, with E for the last word and S for the only one;
BILOU says L and U.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OUTSIDE = "O"
_SAME = {"L": "E", "U": "S"}
_PREFIXES = {"B", "I", "E", "S", "L", "U"}


def parts_of(tag: str) -> tuple[str, str] | None:
    """Prefix and type of a tag, ("O", "") of the one outside; None where it has neither form."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (_SAME.get(prefix, prefix), kind) if dash and kind and prefix in _PREFIXES else None


def scheme_of(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme of training tags: bio, iob1, iobes, or none where a tag has not the form of one.

    Where E or S occurs it is iobes. Of B and I alone it is iob1 where no B begins an entity that stands free and some I
    does, else bio.
    """
    free_begins = free_insides = 0
    ends, any_entity = False, False
    for tags in sentences:
        before = (OUTSIDE, "")
        for tag in tags:
            parts = parts_of(tag)
            if parts is None:
                return "none"
            prefix, kind = parts
            ends |= prefix in "ES"
            any_entity |= prefix != OUTSIDE
            if kind and before[1] != kind:
                free_begins += prefix == "B"
                free_insides += prefix == "I"
            before = parts
    if not any_entity:
        return "none"
    return "iobes" if ends else "iob1" if free_insides and not free_begins else "bio"


def to_bio(tags: Sequence[str], scheme: str) -> list[str]:
    """A sentence's tags in BIO. ValueError naming the first tag that the scheme does not have, and its place.

    An I that continues nothing stays in bio, where it counts as a beginning, as for conlleval.
    """
    if scheme == "none":
        return list(tags)
    converted: list[str] = []
    before = (OUTSIDE, "")
    for place, tag in enumerate(tags):
        parts = parts_of(tag)
        if parts is None or (parts[0] in "ES" and scheme != "iobes"):
            raise ValueError(place, tag)
        prefix, kind = parts
        if prefix == OUTSIDE:
            converted.append(OUTSIDE)
        elif scheme == "bio":
            converted.append(tag)
        else:
            open_before = before[1] == kind and (scheme == "iob1" or before[0] in "BI")
            begins = prefix in "BS" or not open_before
            converted.append(f"{'B' if begins else 'I'}-{kind}")
        before = parts
    return converted


def inside_tags(labels: Sequence[str], scheme: str) -> list[int]:
    """By the number of a tag that of a word's later pieces: I of the same type for a B where there is one, else the
    same."""
    number = {label: index for index, label in enumerate(labels)}
    if scheme == "none":
        return list(number.values())
    return [number.get(f"I-{label[2:]}", index) if label[:2] == "B-" else index for label, index in number.items()]


def bio_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """O, and B and I of each type that occurs, sorted."""
    kinds = sorted({tag[2:] for tag in tags if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))
