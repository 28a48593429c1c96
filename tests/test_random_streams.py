from __future__ import annotations

import numpy as np
import pytest

from lmtool import random_streams


def test_keys_match_known_answers():
    # 0xE220A8397B1DCDAF is the published first output of SplitMix64 seeded with 0.
    assert int(random_streams.mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert random_streams.key(0, "init") == 16294208416658607535
    assert random_streams.key(1, "order", 2, 3) == 6065768019055450705


def test_draws_match_known_answers():
    drawn = random_streams.bits(3, "dropout", 2, np.array([0, 9]), 2, first_draw=1)
    assert drawn.tolist() == [
        [6328171230898303406, 11935481352642565136],
        [5947100588570921012, 14430378920570013436],
    ]
    assert random_streams.uniform(3, "sample", 2, np.array([5]), 2).tolist() == [
        [0.572372141501578, 0.29914248918258357]
    ]


def test_permutations_match_known_answers():
    assert random_streams.Permutation(10, 7, "order", 3)(np.arange(10)).tolist() == [5, 2, 4, 6, 0, 7, 3, 9, 8, 1]
    assert random_streams.Permutation(5000, 7, "order", 3)(np.arange(5)).tolist() == [2891, 643, 3037, 1505, 554]


def test_vectorized_keys_match_single_keys():
    examples = np.array([0, 1, 17, 10**12])
    vector = random_streams.keys(5, "corrupt", 4, examples)
    assert vector.tolist() == [random_streams.key(5, "corrupt", 4, example) for example in examples.tolist()]


def test_draws_depend_on_their_arguments_only():
    whole = random_streams.uniform(1, "corrupt", 0, np.arange(20), 30)
    assert np.array_equal(whole[7:9, 5:12], random_streams.uniform(1, "corrupt", 0, np.array([7, 8]), 7, first_draw=5))
    at = random_streams.uniform_at(1, "corrupt", 0, np.repeat(np.arange(20), 30), np.tile(np.arange(30), 20))
    assert np.array_equal(at.reshape(20, 30), whole)
    for other in [(2, "corrupt", 0), (1, "sample", 0), (1, "corrupt", 1)]:
        assert not np.any(random_streams.uniform(*other, np.arange(20), 30) == whole)


def test_unknown_stream_is_refused():
    with pytest.raises(ValueError):
        random_streams.key(0, "corupt")


def test_uniform_draws_are_uniform_and_uncorrelated():
    drawn = random_streams.uniform(11, "sample", 0, np.arange(1000), 1000)
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.bincount((drawn * 100).astype(int).ravel(), minlength=100)
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 99 + 5 * np.sqrt(2 * 99)
    between = np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]
    across = np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]
    assert abs(between) < 0.005 and abs(across) < 0.005


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10, 63, 64, 65, 1000, 4095, 4096, 65537])
def test_permutation_is_a_bijection(size):
    order = random_streams.Permutation(size, 3, "order", 1)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_empty_permutation_and_index_out_of_range():
    assert random_streams.Permutation(0, 1, "order", 0)(np.arange(0)).size == 0
    with pytest.raises(IndexError):
        random_streams.Permutation(10, 1, "order", 0)(np.array([10]))


def test_permutation_of_a_billion_needs_no_table():
    permutation = random_streams.Permutation(10**9, 1, "order", 0)
    reached = permutation(np.arange(5 * 10**8, 5 * 10**8 + 1000))
    assert len(set(reached.tolist())) == 1000 and reached.min() >= 0 and reached.max() < 10**9


@pytest.mark.parametrize("size", [5, 20])
def test_permutation_targets_are_uniform(size):
    table = np.zeros((size, size))
    for epoch in range(2000):
        table[np.arange(size), random_streams.Permutation(size, 1, "order", epoch)(np.arange(size))] += 1
    expected, freedom = 2000 / size, (size - 1) ** 2
    assert ((table - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)
