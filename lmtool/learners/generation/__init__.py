"""Text generation, token by token, with a key/value cache; and scores of candidate texts."""
