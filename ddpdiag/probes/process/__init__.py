"""Other programs and processes of this host: who holds a port, a bounded run, NCCL's RAS, torchrun's summary."""
