"""The contract of everything that learns, what all learners share, mixtures, and the one evaluator."""
