"""Screens, tables, plots and pages, from files and plain data. Imports no torch."""
