"""Seeded runs of fleets that do not exist, for the same plans, judgement and report."""

from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise
from ddpdiag.simulate.run import simulate

__all__ = ["Fault", "Faults", "Fleet", "Noise", "simulate"]
