"""`ddpdiag train --compare-launchers`: one training, started in every way that people use."""
