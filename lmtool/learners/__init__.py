"""Learners: the interface that the training loop and all commands use; mixtures of learners, and the evaluator."""
