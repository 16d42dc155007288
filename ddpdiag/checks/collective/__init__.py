"""Checks of collectives over gloo and the job's backend."""
