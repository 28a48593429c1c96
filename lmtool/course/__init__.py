"""The course: its document, and the page of its results."""
