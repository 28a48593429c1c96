"""Configuration of finetuning tasks, one module per group of kinds. Imports no torch."""
