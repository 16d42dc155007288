"""Entry points by which launchers run ddpdiag. Each module imports its launcher, and no other part imports it."""
