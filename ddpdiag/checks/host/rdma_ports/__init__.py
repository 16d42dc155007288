"""HST007: RDMA ports."""
