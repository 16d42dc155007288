"""The search for the hosts, GPUs and links that slow the others down."""
