"""The configuration classes of the commands. Imports no torch."""
