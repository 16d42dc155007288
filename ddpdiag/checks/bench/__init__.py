"""COL002: the benchmark of collectives."""
