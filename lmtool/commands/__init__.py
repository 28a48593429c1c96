"""One module a verb: each builds what it needs from the packages below and runs it."""
