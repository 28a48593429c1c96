"""Text corruption: masks, noises and permutations, as pure functions of packed texts, whose random numbers are keyed by
(seed, epoch, example, position)."""
