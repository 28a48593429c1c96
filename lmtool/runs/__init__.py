"""What a run leaves on disk: its folder, checkpoints, locks and what may differ on resume."""
