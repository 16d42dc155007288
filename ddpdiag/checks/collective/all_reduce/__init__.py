"""COL001: all-reduce."""
