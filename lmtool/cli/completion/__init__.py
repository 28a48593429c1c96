"""What TAB offers in a shell, and the scripts that ask for it."""
