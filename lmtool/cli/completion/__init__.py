"""Shell completion: the candidates at a TAB, and the scripts that request them."""
