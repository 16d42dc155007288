"""Error texts of PyTorch, NCCL, gloo, CUDA, Slurm and the kernel: what they mean, and which one came first.

A table of symptoms, and a reader that finds them in a log of any size, in time that grows with its length only.
"""
