"""Error texts of PyTorch, NCCL, gloo, CUDA, Slurm and the kernel: what they mean, and which one came first.

A table of symptoms, and a reader that finds them in a log of any size, in time that grows with its length only.
"""

from ddpdiag.symptoms.reading import explain_log
from ddpdiag.symptoms.table import all_symptoms

__all__ = ["all_symptoms", "explain_log"]
