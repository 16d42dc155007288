"""The GPUs of each host, as NVML, torch and the kernel show them."""
