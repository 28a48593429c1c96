"""Tasks in words: rows as prompts, and answers scored or generated without training."""
