"""The command line: arguments, suggestions, completion, exit status."""
