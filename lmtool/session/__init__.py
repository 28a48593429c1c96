"""The common part of all training commands: a session, its companions, and `fit`, which trains it."""
