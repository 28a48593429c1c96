"""Weights in and out: what a learner takes from a checkpoint."""
