"""Rank 0's part: trials are handed out, and their outcomes collected, within the budget."""
