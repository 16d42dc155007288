"""Two runs compared with each other: what became worse, what better, and what is not known."""
