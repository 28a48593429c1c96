"""The contract of everything that learns, mixtures, and the one evaluator."""
