#!/bin/sh
# Prolog= of slurm.conf, as root before each job on each of its nodes: starts the daemon if needed.
#
# Always exits with 0, and within seconds, since a failing prolog drains the node.  Logs failures to the system's log.

# Slurm gives a prolog no PATH.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

tell() { timeout 5 logger -t pacecar-prolog -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null; }

if command -v systemctl >/dev/null 2>&1; then
  if ! timeout 5 systemctl is-active --quiet pacecar.service; then
    timeout 5 systemctl start --no-block pacecar.service || tell "pacecar.service could not be started"
  fi
else
  tell "no systemd here to start the daemon"
fi
exit 0
