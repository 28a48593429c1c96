"""Scores over plain data, proven against the reference implementations."""
