"""Measured statistics of an objective against its definition: the report of `lmtool inspect`."""
