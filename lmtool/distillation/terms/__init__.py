"""What a student learns from, a file a depth."""
