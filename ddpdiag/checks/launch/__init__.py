"""Settings that launchers give to the ranks."""
