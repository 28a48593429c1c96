"""Text to packed batches: sources, the token store, the plan of an epoch, the loader. Strict readers of tables."""
