"""GPU012: arithmetic and memory of each GPU."""
