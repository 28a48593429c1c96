"""Text from a decoder, token by token, with a key/value cache."""
