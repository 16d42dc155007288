"""Checks of the paths between the GPUs of a host, and the search for a workaround if a path does not work."""
