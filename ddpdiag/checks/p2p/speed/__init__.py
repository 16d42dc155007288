"""P2P005: an all-reduce far below what NCCL's path can do."""
