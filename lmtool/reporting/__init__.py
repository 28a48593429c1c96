"""What a person reads: screens, tables, plots, the report and the plan. From files and plain data, no model inside."""
