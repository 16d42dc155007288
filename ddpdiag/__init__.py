"""ddpdiag: can this allocation train with DistributedDataParallel, how fast, and if not, who is to blame?"""

__version__ = "0.1.0"
