"""Checks of training with DistributedDataParallel."""
