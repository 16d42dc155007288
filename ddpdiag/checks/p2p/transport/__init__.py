"""P2P004: the transport that NCCL chose."""
