"""Task kinds: from table columns to metrics."""
