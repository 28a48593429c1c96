"""The distillation terms."""
