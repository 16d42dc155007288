"""Error texts of PyTorch, NCCL, gloo, CUDA, Slurm and the kernel: what they mean, and which one came first.

Cards hold what a text means, and a matcher finds them in a log of any size, in time that grows with its length only.
Both are pure, and all of ddpdiag may use them; the command and what it prints belong to `ddpdiag explain` alone.
"""
