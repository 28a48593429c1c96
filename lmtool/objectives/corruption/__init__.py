"""Text corruption: pure functions over packed batches, keyed by (seed, epoch, example, position)."""
