"""`ddpdiag train`: train by several strategies, or start one training by several launchers."""
