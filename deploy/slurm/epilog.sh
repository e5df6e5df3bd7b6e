#!/bin/sh
# Epilog= of slurm.conf, as root after each job on each of its nodes: remove what job.sbatch left when it was killed.
# pacecar.service needs no epilog: it forgets a job by itself.
#
# An epilog that fails drains the node, so this ends with 0.

# Slurm gives an epilog no PATH.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

case ${SLURM_JOB_ID:-} in
  '' | *[!0-9]*) ;; # not started by Slurm: nothing is removed
  *) rm -rf -- "/tmp/pacecar-$SLURM_JOB_ID.sock" "/tmp/pacecar-$SLURM_JOB_ID-recordings" ;;
esac
exit 0
