"""What a run costs before it is spent: parameters, FLOPs, memory, disk, time."""
