"""Configuration of tuning methods. Imports no torch."""
