"""Distillation around any objective or task: a model learns from another, from several, or from itself."""
