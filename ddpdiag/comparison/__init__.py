"""Two runs held against each other: what became worse, what better, and what cannot be told."""
