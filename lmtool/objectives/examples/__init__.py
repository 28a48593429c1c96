"""What is planned and laid out of a token store: windows, pairs, and the batches an objective makes of them."""
