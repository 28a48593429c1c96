"""What stands on a backbone: heads, their losses, and the base of every learner."""
