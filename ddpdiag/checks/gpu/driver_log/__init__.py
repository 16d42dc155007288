"""GPU011: what the NVIDIA driver wrote to the kernel's log."""
