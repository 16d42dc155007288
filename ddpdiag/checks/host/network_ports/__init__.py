"""HST006: counters of network ports."""
