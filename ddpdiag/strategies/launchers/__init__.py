"""`ddpdiag train --compare-launchers`: one training, started by each common launcher."""
