"""GPUs as NVML, sysfs and the kernel's log show them."""
