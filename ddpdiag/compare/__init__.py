"""`ddpdiag compare`: what changed between two runs."""
