"""A mesh: every host measures a TCP connection to every other one at the same time."""
