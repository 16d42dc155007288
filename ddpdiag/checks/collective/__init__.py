"""Collectives over the job's backend."""
