"""What pretraining learns: one file an objective."""
