"""What a teacher says of a run's examples, on disk: written in one pass, read by every student of a sweep."""
