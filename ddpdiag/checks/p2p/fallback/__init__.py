"""P2P003: the fallback search, for variables that avoid a fault."""
