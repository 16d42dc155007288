"""Rank 0's part of a run: it sends trials to the ranks and collects their outcomes, within the budget."""
