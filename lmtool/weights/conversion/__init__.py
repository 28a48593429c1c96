"""Conversions by import and export: architectures, vocabularies, adapters, word vectors."""
