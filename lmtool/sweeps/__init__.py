"""Sweeps: a command run many times, the records of the jobs, and the final table."""
