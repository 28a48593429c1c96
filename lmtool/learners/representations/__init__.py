"""What hidden states hold: vectors of texts and tokens, and linear probes on every layer."""
