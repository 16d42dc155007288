"""`ddpdiag allreduce-bench`: collectives measured as nccl-tests does, and what the figures mean."""
