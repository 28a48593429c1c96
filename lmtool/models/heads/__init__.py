"""Heads on a backbone, their losses, and the base of every learner."""
