"""Resources that a host leaves to its ranks: cores, memory, limits, network ports."""
