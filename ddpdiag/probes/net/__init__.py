"""The network of this host: TCP connects, ports, interfaces, RDMA, counters, and what NCCL logs of it."""
