"""P2P002: copies between the GPUs of a host."""
