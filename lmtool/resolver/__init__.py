"""From words to a decoded configuration, and the rules between its sections."""
