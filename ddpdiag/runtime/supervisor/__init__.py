"""The process that the launcher started for a rank, and the processes below it that run trials."""
