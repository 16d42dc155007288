"""What launchers told the ranks."""
