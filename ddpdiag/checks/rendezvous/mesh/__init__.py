"""RDZ004: TCP between all hosts."""
