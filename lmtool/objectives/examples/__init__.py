"""Pretraining examples from a token store: how windows and pairs are planned, corrupted and batched."""
