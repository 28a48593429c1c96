"""Prompting: rows as prompts, with answers scored or generated without training."""
