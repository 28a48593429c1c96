"""Representations of texts: vectors from hidden states, attention weights, probes."""
