"""The supervisor, which the launcher starts for each rank, and the processes that it starts to run trials."""
