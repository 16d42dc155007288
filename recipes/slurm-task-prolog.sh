#!/bin/bash
# Slurm TaskProlog: write the state of its nodes into each job's output; nothing is drained, and every task still
# runs. It sees what a task sees: its control group, its limits, its GPUs. In slurm.conf on every node:
#   TaskProlog=/etc/slurm/slurm-task-prolog.sh          (or for one step: srun --task-prolog=...)
# Slurm reads its standard output: a line `print ...` reaches the task's output, `export N=V` sets a variable there. So
# a script can ask for "$DDPDIAG_HOST" (fit, unfit, unknown) in the first task on each node.
# A job goes without it by `export DDPDIAG_SKIP=1`.
# Change: where ddpdiag lies, its options.
DDPDIAG=/opt/ddpdiag/bin/ddpdiag
OPTIONS=(--budget 10)

# A TaskProlog has the task's environment, whose PATH may be anything.
PATH=/usr/bin:/bin
[ "${DDPDIAG_SKIP:-}" = 1 ] && exit 0
# Once on each node.
[ "${SLURM_LOCALID:-0}" = 0 ] || exit 0

# The task's Python is another one.
report=$(timeout --kill-after=2 20 env -u PYTHONPATH -u PYTHONHOME "$DDPDIAG" host "${OPTIONS[@]}" 2>&1 </dev/null)
code=$?
# Not without a verdict (FIT, with a warning under --strict): Python itself exits with 1 where an installation
# is broken.
grep -Eq '^(UN)?FIT: ' <<<"$report" || code=none
case $code in
    0) verdict=fit ;;
    1) verdict=unfit ;;
    *) verdict=unknown ;;
esac
echo "export DDPDIAG_HOST=$verdict"
if [ "$verdict" = fit ]; then
    report=$(sed -n '/^FIT:/,$p' <<<"$report") # the sentence is enough
fi
sed 's/^/print /' <<<"$report"
exit 0
