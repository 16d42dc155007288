"""LCH004: the job step, as Slurm laid it out."""
