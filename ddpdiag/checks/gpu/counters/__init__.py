"""GPU010: counters that rise while the run loads a GPU."""
