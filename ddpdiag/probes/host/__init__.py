"""This host: limits, /proc, /sys, shared files, versions, variables."""
