#!/usr/bin/env bash
# Check several hosts with torchrun, and train only if all of them are fit. Start it on every host at about the same
# time, with that host's number (pdsh, parallel-ssh, or several shells):
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node01 recipes/torchrun-hosts.sh train.py --epochs 10     # on node01
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node01 recipes/torchrun-hosts.sh train.py --epochs 10     # on node02
# Change: RANKS (ranks on each host), MASTER_PORT, CHECK (options of the check), how the environment is activated.
set -euo pipefail
# module load cuda
# . "$HOME/venv/bin/activate"
: "${NNODES:?the number of hosts}" "${NODE_RANK:?the number of this host, from 0}" "${MASTER_ADDR:?the host of rank 0}"
RANKS=${RANKS:-2}
MASTER_PORT=${MASTER_PORT:-29500}

launch=(torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS")
launch+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
# Every rank exits with the same code, so either all hosts go on or none. torchrun turns what is not 0 into 1.
# shellcheck disable=SC2086
"${launch[@]}" -m ddpdiag check ${CHECK:-}
exec "${launch[@]}" "$@"
