"""Hidden states: vectors of texts and tokens, attention weights, and linear probes on every layer."""
