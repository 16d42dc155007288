"""What launchers set for the ranks."""
