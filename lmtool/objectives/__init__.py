"""Pretraining objectives: masked, permutation, causal and sequence-to-sequence modeling, skip-gram."""
