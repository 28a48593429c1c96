"""Trials of lmtool: faults planted one at a time, each with a verdict. scripts/faults.py runs them."""
