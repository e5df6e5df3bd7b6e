#!/bin/sh
# Epilog= of slurm.conf, as root after each job on each of its nodes: cleans up after a killed job.sbatch.
# pacecar.service needs no epilog.
#
# Always exits with 0, since a failing epilog drains the node.

# Slurm gives an epilog no PATH.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

case ${SLURM_JOB_ID:-} in
  '' | *[!0-9]*) ;; # not started by Slurm: nothing is removed
  *) rm -rf -- "/tmp/pacecar-$SLURM_JOB_ID.sock" "/tmp/pacecar-$SLURM_JOB_ID-recordings" ;;
esac
exit 0
