"""Tuning methods: select, add and edit trainable parameters of a built model, by its uniform names."""
