"""The shared blocks: attention, positions, feed-forward, layers, embeddings. Knows torch only, no family's name."""
