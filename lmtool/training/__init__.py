"""The loop and what stands around it: optimizers, schedules, precision, budgets, checkpoints, run folders."""
