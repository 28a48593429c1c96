"""Trackers: what shows a run elsewhere, beside the files in its folder. Each works in a process of its own."""
