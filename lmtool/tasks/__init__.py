"""What finetuning learns: a few task kinds; a shipped task is a YAML over one of them."""
