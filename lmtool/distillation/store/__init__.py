"""Stored teacher outputs for a run's examples: written in one pass, and read by every student of a sweep."""
