"""What an objective does to text, measured against its definition: what `lmtool inspect` reports."""
