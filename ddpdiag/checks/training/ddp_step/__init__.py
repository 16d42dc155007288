"""TRN003: one step of DistributedDataParallel."""
