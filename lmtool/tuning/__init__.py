"""Tuning methods: select, add and edit trainable parameters of a built model by their names."""
