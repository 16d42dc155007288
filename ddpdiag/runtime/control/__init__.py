"""The control channel between rank 0 and every supervisor; it uses nothing that the checks test."""
