"""The training loop, optimizers, schedules, precision, budgets and processes. Blind to models."""
