"""What a person reads: screens, tables, plots and pages, from files and plain data. Imports no torch."""
