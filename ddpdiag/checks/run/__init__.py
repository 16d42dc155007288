"""Checks of the run itself: which ranks joined, which ranks stayed, and which trials failed."""
