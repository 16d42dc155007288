"""The control channel: between rank 0 and every supervisor, out of band, and never over what is being tested."""
