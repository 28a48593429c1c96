"""Hidden states: vectors, attention weights, probes."""
