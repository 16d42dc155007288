#!/bin/bash
# Slurm Prolog: test a node before each job, for half a second; a node that cannot train is drained, and the job waits
# for another one. In slurm.conf on every node:
#   Prolog=/etc/slurm/slurm-prolog.sh
#   PrologFlags=Alloc                 # else it runs with the first step only
#   PrologEpilogTimeout=60            # beyond the limits below
# A job goes without it by `sbatch --comment=DDPDIAG_SKIP=1` (or --extra, which Slurm has since 23.11).
# Change: where ddpdiag lies (a local disk: whatever lies on a file server waits for it), its options (--expect-gpus 8
# where every node has eight; --torch takes 2 to 5 s more), what counts as a reason to drain. Without an installation:
# DDPDIAG=/opt/ddpdiag.pyz, the one-file program (executable).
DDPDIAG=/opt/ddpdiag/bin/ddpdiag
OPTIONS=(--budget 10)

# slurmd gives a Prolog no PATH.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
case " ${SLURM_JOB_COMMENT:-} ${SLURM_JOB_EXTRA:-} " in
    *DDPDIAG_SKIP=1*) exit 0 ;;
esac

# ddpdiag keeps its own time limit; the outer one is for an interpreter that does not even start.
report=$(timeout --kill-after=2 20 "$DDPDIAG" host "${OPTIONS[@]}" 2>&1 </dev/null)
code=$?
[ "$code" = 0 ] && exit 0

report="ddpdiag host left with $code on ${SLURMD_NODENAME:-$(uname -n)}, job ${SLURM_JOB_ID:-?}:
$report"
printf '%s\n' "$report" >&2
printf '%s\n' "$report" | logger -t ddpdiag -p daemon.err 2>/dev/null
# Every exit code but 0 drains the node, so only 1 may be passed on: ddpdiag found a fault. Not 2 (wrong options), 3 (a
# check was not possible, or did not end in time), 4 (a bug), 124 and 137 (the outer limit), 126 and 127 (it cannot be
# started). And not a 1 without a verdict (FIT, with a warning under --strict): Python itself exits with 1
# where an installation is broken, which would drain every node.
[ "$code" = 1 ] && grep -Eq '^(UN)?FIT(, degraded)?: ' <<<"$report" && exit 1
exit 0
