"""Weights in and out: reads checkpoints into learners, and writes them for transformers."""
