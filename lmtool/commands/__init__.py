"""One short, straight-line file a command: build, train, evaluate, save."""
