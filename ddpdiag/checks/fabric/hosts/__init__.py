"""FAB001: the search among hosts."""
