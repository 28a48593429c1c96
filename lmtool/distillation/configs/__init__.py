"""Configuration of distillation: the modes, and the terms."""
