"""Entry points of launchers, and functions for frameworks. No other part of ddpdiag imports these modules."""
