"""Dependency trees of sentences: the path from the root to each word, from the heads of the words.

Shape letters: M words of a sentence, D levels of the deepest word, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ANCESTORS = "ancestors"
"""The column (T, D) of a batch with the path of each token's word: the numbers of the words from the root down to it,
then -1. Tokens that belong to no word have -1 only."""


class NoTree(ValueError):
    """Heads that are no tree. word: the index of the word with the problem. problem: the problem, in words."""

    def __init__(self, word: int, problem: str):
        super().__init__(problem)
        self.word, self.problem = word, problem


def numbers_of_heads(heads: Sequence[object], words: int) -> list[int]:
    """Returns the head of each word as the index of a word, -1 for the root.

    Args:
        heads: The heads as in CoNLL-U: numbers of words from 1, as text or numbers; 0 for the root.
        words: The number of words of the sentence.

    Raises:
        NoTree: Unless each word has one head within the sentence, one word is the root, and no word depends on itself.
    """
    if len(heads) != words:
        raise NoTree(0, f"{words} words and {len(heads)} heads")
    parents: list[int] = []
    for word, head in enumerate(heads):
        text = str(head).strip()
        if not text.isdecimal() or int(text) > words:
            raise NoTree(word, f"the head is {text or 'missing'}, not a number from 0 to {words}")
        parents.append(int(text) - 1)
    roots = [word for word, parent in enumerate(parents) if parent < 0]
    if len(roots) > 1:
        raise NoTree(roots[1], f"the sentence has {len(roots)} roots")
    reached: set[int] = set(roots)
    for word in range(words):
        path: list[int] = []
        while word not in reached:
            if word in path:
                raise NoTree(word, "the word depends on itself")
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
