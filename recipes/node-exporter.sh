#!/bin/bash
# Metrics of this host for Prometheus, through node-exporter's textfile collector.
#   cron:     */5 * * * * root /opt/ddpdiag/recipes/node-exporter.sh
#   systemd:  a service with ExecStart=/opt/ddpdiag/recipes/node-exporter.sh and Type=oneshot, and a timer with
#             OnCalendar=*:0/5 and RandomizedDelaySec=60
# node-exporter must be started with --collector.textfile.directory=DIRECTORY. The metrics ddpdiag_* have the
# verdict and each finding; alert on `time() - ddpdiag_run_timestamp_seconds > 1800` as well, or a host that is not
# tested any more looks healthy.
# Change: where ddpdiag lies, the directory (as DIRECTORY, or here), the options.
DDPDIAG=${DDPDIAG:-/opt/ddpdiag/bin/ddpdiag}
DIRECTORY=${DIRECTORY:-/var/lib/node_exporter/textfile_collector}

export PATH=/usr/sbin:/usr/bin:/sbin:/bin
# The file is replaced at once, so that node-exporter never reads half of it, and must be readable for it.
umask 022
written() { stat -c '%i %y' "$DIRECTORY/ddpdiag.prom" 2>/dev/null; }
before=$(written)
timeout --kill-after=2 60 "$DDPDIAG" host --budget 30 --prometheus "$DIRECTORY/ddpdiag.prom" >/dev/null
code=$?
# Whether the host is fit is in the metrics; the job itself failed if they could not be written, or were not: a broken
# installation exits with 1 as well.
[ "$code" -le 1 ] || [ "$code" = 3 ] || exit "$code"
[ "$(written)" != "$before" ] || exit $((code ? code : 1))
