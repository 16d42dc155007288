"""How the GPUs of a host reach each other, and what gets a backend around what does not work."""
