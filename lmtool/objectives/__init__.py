"""Pretraining objectives: masked, permutation, causal and sequence-to-sequence language modeling, and skip-gram."""
