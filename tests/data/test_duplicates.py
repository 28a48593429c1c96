"""Texts that occur twice: which are equal, and how similar the others are."""

from __future__ import annotations

import random
import string

import numpy as np
import pytest

from lmtool.data.duplicates import TextIndex, jaccard, normalized, overlap, repeats, shingles_of


def text(chance: random.Random, words: int) -> list[str]:
    return ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(3, 8))) for _ in range(words)]


def test_case_punctuation_and_spacing_make_no_difference():
    index, matches = repeats(["A cat, sat!", "another", "a  CAT sat", "!!!", "???", "!!!", ""])
    assert {number: match.number for number, match in matches.items()} == {2: 0, 5: 3}
    assert index.match("another.").number == 1 and index.match("a cat") is None
    assert normalized("Ärger, 3x!") == "ärger 3x"


def test_similarity_is_that_of_sets_of_five_characters():
    first, second = "abcdefgh", "abcdefgx"
    sets = [{value[start : start + 5] for start in range(4)} for value in (first, second)]
    assert jaccard(*map(shingles_of, (first, second))) == len(sets[0] & sets[1]) / len(sets[0] | sets[1]) == 3 / 5
    assert len(shingles_of("abc")) == len(shingles_of("")) == 1
    pieces = {f"{number:05d}" for number in range(0, 100_000, 7)}
    assert len(np.unique([shingles_of(piece)[0] for piece in pieces])) > 0.999 * len(pieces)  # of 32 bits


def test_near_duplicates_are_measured_and_few_are_missed():
    chance = random.Random(0)
    originals = [text(chance, 30) for _ in range(300)]
    changed = []
    for words in originals:
        copy = list(words)
        for place in chance.sample(range(30), chance.randint(1, 4)):
            copy[place] = text(chance, 1)[0]
        changed.append(" ".join(copy))
    texts = [" ".join(words) for words in originals]
    true = {n: jaccard(shingles_of(changed[n]), shingles_of(texts[n])) for n in range(300)}
    near = {number for number, similarity in true.items() if similarity >= 0.7}
    assert 50 < len(near) < 290
    index, within = repeats(texts, 0.7)
    assert not within
    found = dict(overlap(changed, index))
    assert found.keys() <= near and len(found) > 0.95 * len(near)
    assert all(match.number == number and match.similarity == true[number] for number, match in found.items())


def test_an_equal_text_goes_before_a_similar_one():
    index = TextIndex(0.5)
    assert index.add(0, "the quick brown fox jumps over a dog") is None
    assert index.add(1, "the quick brown fox jumps over a cat").number == 0
    assert index.match("The quick brown fox jumps over a cat!").similarity == 1.0
    assert index.match("The quick brown fox jumps over a cat!").number == 1


def test_the_library_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasketch", None)
    TextIndex()
    with pytest.raises(Exception, match="datasketch") as raised:
        TextIndex(0.8)
    assert "pip install 'lmtool[check]'" in raised.value.hint
