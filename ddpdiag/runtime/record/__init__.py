"""What a run keeps on disk, so that it outlives rank 0."""
