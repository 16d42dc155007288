#!/usr/bin/env bash
# Check with mpirun (Open MPI), and train only if all hosts are fit.
#   recipes/mpirun.sh -np 16 --hostfile hosts -- train.py --epochs 10
# Before `--` are mpirun's own options, after it the training script and its arguments. Start it on the host of rank 0,
# the first of the hostfile: Open MPI does not give the ranks its name.
# Change: MASTER_ADDR and MASTER_PORT, if this host is known to the others by another name; CHECK (options of the
# check); how the environment is activated; the variables that each host needs as well (-x NAME).
set -euo pipefail
# module load openmpi
# . "$HOME/venv/bin/activate"
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ "${1:-}" = -- ] || { echo "usage: $0 MPIRUN-OPTIONS -- SCRIPT ARGUMENTS" >&2; exit 2; }
shift
MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
MASTER_PORT=${MASTER_PORT:-29500}
export MASTER_ADDR MASTER_PORT
# Without --bind-to none each rank gets one core, whatever the number of its threads.
# mpirun gives other hosts only the variables that -x names.
launch=(mpirun --bind-to none "${options[@]}" -x MASTER_ADDR -x MASTER_PORT -x PATH)
[ -z "${DDPDIAG_TOKEN:-}" ] || launch+=(-x DDPDIAG_TOKEN)

# The highest exit code of all ranks; all ranks exit with the same one.
# shellcheck disable=SC2086
"${launch[@]}" ddpdiag check ${CHECK:-}
# torch reads its own variables, and mpirun sets others: this sets torch's from mpirun's.
# shellcheck disable=SC2016
exec "${launch[@]}" bash -c '
    export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
    export LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
    exec python "$@"' train "$@"
