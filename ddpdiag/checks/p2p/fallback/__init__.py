"""P2P003: the search for NCCL variables that avoid a fault."""
