"""The paths between the GPUs of a host, and workarounds for those that do not work."""
