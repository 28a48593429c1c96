"""Finetuning tasks: a few task kinds; each shipped task is a YAML of one kind."""
