#!/usr/bin/env bash
# Check this host with as many ranks as the training will have, and train only if it is fit.
# Change: the number of ranks (RANKS), and the training command, which is given as arguments:
#   RANKS=8 recipes/torchrun.sh train.py --epochs 10
set -euo pipefail
# module load cuda
# . "$HOME/venv/bin/activate"
RANKS=${RANKS:-2}

# torchrun turns every non-zero exit code into 1; the report in the job's log says which it was.
torchrun --standalone --nproc-per-node "$RANKS" -m ddpdiag check
exec torchrun --standalone --nproc-per-node "$RANKS" "$@"
