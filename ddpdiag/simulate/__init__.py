"""Seeded runs of fleets that do not exist, for the same plans, judgement and report."""
