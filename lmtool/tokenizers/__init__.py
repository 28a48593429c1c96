"""Tokenizers: train, load, save. Built on the `tokenizers` library, in Hugging Face's file layout."""
