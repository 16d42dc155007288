"""Explain error texts of PyTorch, NCCL, gloo, CUDA, Slurm and the kernel: their meaning, and which one came first.

A card holds one error text and its meaning. The matcher finds the texts of all cards in a log of any size. Cards and
matcher have no side effects, and all of ddpdiag may use them; `command` and `render` serve `ddpdiag explain` only.
"""
