"""What runs on each rank of a benchmark: sweeps over sizes, single calls and their times."""
