"""P2P001: the paths between the GPUs of a host."""
