"""The command line: arguments, dispatch, errors and exit status, completion."""
