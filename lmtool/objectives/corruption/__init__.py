"""What is done to text: pure functions over packed batches, keyed by (seed, epoch, example, position)."""
