"""Learners: the interface of everything that is trained; mixtures of learners; the evaluator."""
