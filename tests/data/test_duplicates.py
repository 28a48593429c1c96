"""Duplicate texts: equal ones, and near duplicates by similarity."""

from __future__ import annotations

import random
import string

import numpy as np

from lmtool.data.duplicates import Matches, TextIndex, jaccard, normalize, shingles_of, texts_with_numbers


def text(chance: random.Random, words: int) -> list[str]:
    return ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(3, 8))) for _ in range(words)]


def matches_by_number(matches: Matches) -> dict[int, tuple[int, float]]:
    numbers = np.flatnonzero(matches.repeated >= 0).tolist()
    return {number: (int(matches.repeated[number]), float(matches.similarity[number])) for number in numbers}


def test_equal_texts_ignore_case_punctuation_and_spacing():
    index = TextIndex(["A cat, sat!", "another", "a  CAT sat", "!!!", "???", "!!!", ""])
    assert matches_by_number(index.repeats()) == {2: (0, 1.0), 5: (3, 1.0)}
    assert matches_by_number(index.overlap(TextIndex(["another.", "a cat"]))) == {0: (1, 1.0)}
    assert not matches_by_number(TextIndex([]).overlap(index)) and not matches_by_number(index.overlap(TextIndex([])))
    assert normalize("Ärger, 3x!") == "ärger 3x"


def test_similarity_is_jaccard_of_five_character_shingles():
    first, second = "abcdefgh", "abcdefgx"
    sets = [{value[start : start + 5] for start in range(4)} for value in (first, second)]
    assert jaccard(*map(shingles_of, (first, second))) == len(sets[0] & sets[1]) / len(sets[0] | sets[1]) == 3 / 5
    assert len(shingles_of("abc")) == len(shingles_of("")) == 1
    pieces = {f"{number:05d}" for number in range(0, 100_000, 7)}
    assert len(np.unique([shingles_of(piece)[0] for piece in pieces])) > 0.999 * len(pieces)  # 32-bit hashes


def test_near_duplicates_are_found_with_exact_similarity():
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
    index = TextIndex(texts, 0.7)
    assert not matches_by_number(index.repeats())
    matches = matches_by_number(index.overlap(TextIndex(changed, 0.7)))
    assert matches.keys() <= near and len(matches) > 0.95 * len(near)
    assert all(match == (number, true[number]) for number, match in matches.items())


def test_equal_text_is_preferred_to_similar_text():
    fox = "the quick brown fox jumps over a "
    index = TextIndex([f"{fox}dog", f"{fox}cat"], 0.5)
    assert matches_by_number(index.repeats()).keys() == {1}
    equal = f"The{fox[3:]}cat!"
    assert matches_by_number(index.overlap(TextIndex([equal, f"{fox}bat", equal], 0.5)))[2] == (1, 1.0)


def test_most_similar_of_many_texts_is_reported():
    chance = random.Random(1)
    words = text(chance, 60)
    copies = [" ".join([*words, *text(chance, 3)]) for _ in range(500)]
    matches = matches_by_number(TextIndex(copies, 0.6).repeats())
    assert matches.keys() == set(range(1, 500)) and all(number > match for number, (match, _) in matches.items())
    nearly = f"{copies[450]} end"
    assert matches_by_number(TextIndex([*copies[:3], copies[450]], 0.6).overlap(TextIndex([nearly], 0.6)))[0][0] == 3


def test_only_a_sample_of_many_texts_is_compared(monkeypatch):
    chance = random.Random(2)
    texts = [" ".join(text(chance, 20)) for _ in range(40)]
    texts += [f"{copied} end" for copied in texts]
    every = TextIndex(texts, 0.7)
    monkeypatch.setattr("lmtool.data.duplicates.MOST_TEXTS", 40)
    sampled, another = TextIndex(texts, 0.7, seed=0), TextIndex(texts, 0.7, seed=1)
    assert every.compared == (80, 80) and sampled.compared == (40, 80)
    pairs = [matches_by_number(index.repeats()) for index in (every, sampled, another)]
    assert len(pairs[0]) == 40 and 0 < len(pairs[1]) < 40
    assert pairs[1].items() < pairs[0].items() and pairs[1] != pairs[2]


def test_long_text_has_same_shingles_in_parts(monkeypatch):
    chance = random.Random(3)
    for length in (100, 101, 104, 105):
        long = "".join(chance.choices(string.ascii_lowercase, k=length))
        monkeypatch.undo()
        expected = shingles_of(long)
        monkeypatch.setattr("lmtool.data.duplicates._PART", 50)
        assert np.array_equal(shingles_of(long), expected)


def test_texts_are_read_by_number():
    assert dict(texts_with_numbers(iter("abcd"), np.array([1, 3]))) == {1: "b", 3: "d"}
    assert dict(texts_with_numbers(iter("abcd"), np.array([], dtype=np.int64))) == {}
