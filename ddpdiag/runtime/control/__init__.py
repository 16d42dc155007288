"""The control channel between rank 0 and every supervisor. It uses ZeroMQ and nothing of torch or NCCL."""
