"""Trackers show the rows of a run elsewhere. Each works in a process of its own."""
