#!/usr/bin/env bash
# No launcher at all: a shell on each host, and this script in it, with the number of that host. The check starts the
# ranks of its host itself; then torchrun trains.
#   recipes/by-hand.sh 0 2 node01 train.py --epochs 10      # in the shell on node01
#   recipes/by-hand.sh 1 2 node01 train.py --epochs 10      # in the shell on node02, within --join-timeout
# Where each process is one rank, started by something of your own, say so instead:
#   ddpdiag check --rank R --world-size N --master-addr node01
# Change: RANKS (ranks on each host), MASTER_PORT, CHECK (options of the check), how the environment is activated.
set -euo pipefail
# . "$HOME/venv/bin/activate"
node_rank=${1:?the number of this host, from 0} nodes=${2:?the number of hosts} master=${3:?the host of rank 0}
shift 3
RANKS=${RANKS:-2}
MASTER_PORT=${MASTER_PORT:-29500}

place=(--nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$RANKS")
place+=(--master-addr "$master" --master-port "$MASTER_PORT")
# People type slowly: two minutes to be everywhere.
# shellcheck disable=SC2086
ddpdiag check "${place[@]}" --join-timeout 120 --budget 240 ${CHECK:-}
exec torchrun "${place[@]}" "$@"
