"""Which parameters learn: edits a built model by its uniform names."""
