"""Learners: the interface of everything that can be trained; mixtures of learners, and the evaluator."""
