"""The work of each rank in a benchmark: a sweep over all sizes, and the timing of its calls. Imports torch."""
