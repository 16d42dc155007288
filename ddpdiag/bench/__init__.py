"""`ddpdiag allreduce-bench`: measure collectives as nccl-tests does, and explain the figures."""
