"""The coordinator of rank 0, which sends trials to the ranks and collects their outcomes, within the budget."""
