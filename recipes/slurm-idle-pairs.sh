#!/bin/bash
# Check idle nodes of Slurm in pairs, so that every node has a report every few days, whether jobs run on it or not, and
# so that a node is checked with other partners. For /etc/cron.d, as the user ddpdiag, on a host from which jobs can be
# submitted (cron knows no continued lines):
#   */30 * * * *  ddpdiag  /opt/ddpdiag/recipes/slurm-idle-pairs.sh
#   15 6 * * *  ddpdiag  cd /shared/ddpdiag && /opt/ddpdiag/bin/ddpdiag history . --index history.db -q --html history.html
# Change: REPORTS (a folder that all nodes share), PAIRS (pairs for each call), RANKS (ranks on each node, else one per
# allocated GPU), OPTIONS (of sbatch: where nodes have GPUs `--exclusive --gpus-per-node=8`, else the pairs are tested
# with one rank on each node and without a GPU; a partition or a low-priority QOS), DDPDIAG (where it lies), CHECK (options).
REPORTS=${REPORTS:-/shared/ddpdiag}
PAIRS=${PAIRS:-4}
DDPDIAG=${DDPDIAG:-/opt/ddpdiag/bin/ddpdiag}
set -uo pipefail
# Known only on the node.
ranks=${RANKS:-'${SLURM_GPUS_ON_NODE:-1}'}

# A node of two partitions is listed twice. `idle` without a suffix: not drained, not powered down, not reserved.
mapfile -t nodes < <(sinfo --noheader --Node --states=idle --format='%N %t' | awk '$2 == "idle" {print $1}' | sort -u | shuf)
for ((i = 0; i + 1 < ${#nodes[@]} && i < 2 * PAIRS; i += 2)); do
    # --deadline: a pair that got another job meanwhile is not waited for. --nice: real jobs come first.
    sbatch --quiet --job-name=ddpdiag-pair --nodes=2 --ntasks-per-node=1 --nodelist="${nodes[i]},${nodes[i + 1]}" \
        --time=5 --deadline=now+10minutes --nice=10000 --output=/dev/null ${OPTIONS:-} --wrap "
            mkdir -p '$REPORTS'/\$(date +%Y-%m)
            srun -N 2 -n 2 --wait=10 '$DDPDIAG' check ${CHECK:-} --nproc-per-node $ranks \
                --json '$REPORTS'/\$(date +%Y-%m)/pair-\$SLURM_JOB_ID.json"
done
