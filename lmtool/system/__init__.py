"""The machine around lmtool: files, processes, signals, the network and the terminal."""
