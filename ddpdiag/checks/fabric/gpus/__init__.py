"""FAB002: the search among the GPUs of a host."""
