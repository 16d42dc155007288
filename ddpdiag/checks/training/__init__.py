"""Training with DistributedDataParallel."""
