"""Pretraining objectives: masked, permuted, causal and sequence-to-sequence modeling, skip-gram."""
