"""Distillation: a model learns from another one, from several, or from itself."""
