"""Estimated costs of a run: parameters, FLOPs, memory, disk, time."""
