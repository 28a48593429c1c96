"""What every training command shares: a session, its companions and fit."""
