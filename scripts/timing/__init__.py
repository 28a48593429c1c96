"""Two sides timed in turns: what scripts/benchmark.py and scripts/gpu.py share."""
