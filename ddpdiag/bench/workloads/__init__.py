"""What each rank runs in a benchmark: a sweep over all sizes, and the timing of its calls. Imports torch."""
