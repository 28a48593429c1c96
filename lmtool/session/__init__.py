"""The common part of training commands: a session, its companions, and fit."""
