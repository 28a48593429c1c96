"""Plans and batches of pretraining examples from a token store: windows, pairs, and their corruption."""
