"""Dependency trees of sentences: the path from the root to each word, from the heads of the words.

Shape letters: M words of a sentence, D levels of the deepest word, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ANCESTORS = "ancestors"
"""The column (T, D) of a batch with the path of each token's word: the numbers of the words from the root down to it,
then -1. Tokens that belong to no word have -1 only. The words of a pair's two texts have different numbers, so that
paths of the two trees share no word."""


class NoTree(ValueError):
    """Heads that are no tree. word: the index of the word with the problem. problem: the problem, in words."""

    def __init__(self, word: int, problem: str):
        super().__init__(problem)
        self.word, self.problem = word, problem


def numbers_of_heads(heads: Sequence[object], words: int) -> list[int]:
    """Returns the head of each word as the index of a word, -1 for the root. heads: as in CoNLL-U: numbers of words
    from 1, as text or numbers; 0 for the root. Raises NoTree unless each word has one head within the sentence, one
    word is the root, and no word depends on itself."""
    if len(heads) != words:
        raise NoTree(0, f"{words} words and {len(heads)} heads")
    parents: list[int] = []
    for word, head in enumerate(heads):
        text = str(head).strip()
        if not text.isdecimal() or int(text) > words:
            raise NoTree(word, f"the head of word {word + 1} is {text or 'missing'}, not a number from 0 to {words}")
        parents.append(int(text) - 1)
    roots = [word for word, parent in enumerate(parents) if parent < 0]
    if len(roots) > 1:
        raise NoTree(roots[1], f"the sentence has {len(roots)} roots")
    reached: set[int] = set(roots)
    for word in range(words):
        path: list[int] = []
        while word not in reached:
            if word in path:
                raise NoTree(word, f"word {word + 1} depends on itself")
            path.append(word)
            word = parents[word]
        reached.update(path)
    return parents


def paths_from_root(parents: Sequence[int], levels: int | None = None) -> np.ndarray:
    """Returns (M, D) int32: the words from the root down to each word, then -1. parents: the index of each word's head,
    -1 for the root. levels: D; None for the deepest word's."""
    paths: list[list[int]] = []
    for word in range(len(parents)):
        path = [word]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    width = max(map(len, paths), default=0) if levels is None else levels
    table = np.full((len(paths), width), -1, dtype=np.int32)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return table


def paths_of_tokens(
    trees: Sequence[Sequence[Sequence[int]]], words: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Returns, for each text of an example, the paths of the tokens of all examples, (T, D) int32. trees, words: for
    each text and example, the index of each word's head, -1 for the root, and of each token's word, -1 for none."""
    levels = max((paths_from_root(parents).shape[1] for text in trees for parents in text), default=0)
    none = np.full((1, max(levels, 1)), -1, dtype=np.int32)  # the last row of a table, for tokens of no word
    paths, first = [], 0
    for text, text_words in zip(trees, words, strict=True):
        parts = [none[:0]]
        for parents, word_T in zip(text, text_words, strict=True):
            table = paths_from_root(parents, none.shape[1])
            parts.append(np.concatenate([np.where(table < 0, -1, table + first), none])[word_T])
        paths.append(np.concatenate(parts))
        first += max(map(len, text), default=0)
    return paths
