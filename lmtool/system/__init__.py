"""What lmtool asks of the machine around it: files, processes, signals, the network and the terminal."""
