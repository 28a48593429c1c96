"""Pretraining objectives: masked, permuted, causal, sequence-to-sequence modeling; skip-gram."""
