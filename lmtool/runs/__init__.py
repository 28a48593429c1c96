"""The files of a run: folder, checkpoints, locks; and which keys may differ on resume."""
