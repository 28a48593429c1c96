"""Checks of each objective's examples, for `lmtool inspect`: measured statistics compared with their definitions."""
