"""`ddpdiag train`: training by several strategies, and by several launchers."""
