"""For people at a terminal or with a log: the report, and the progress of a run."""
