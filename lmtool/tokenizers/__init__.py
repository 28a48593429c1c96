"""Tokenizers: train, load and save them with the `tokenizers` library, in Hugging Face's file layout."""
