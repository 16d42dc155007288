"""GPU001: GPUs that should be there."""
