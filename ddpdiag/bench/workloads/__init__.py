"""The part of each rank in a benchmark: sweeps over sizes, single calls and their times."""
