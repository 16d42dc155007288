"""Code that a worker runs with torch: collectives, copies and training, most of it over an open process group."""
