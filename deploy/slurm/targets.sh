#!/bin/sh
# The nodes of a Slurm cluster as Prometheus reads them (prometheus/slurm.yml).  From cron or a timer, where sinfo works:
#   targets.sh /etc/prometheus/targets/pacecar.json
# Nodes that Slurm calls down are left in: that one cannot be scraped is what one wants to be told.
set -eu

file=${1:?usage: targets.sh FILE [PORT]}
port=${2:-9850}

nodes=$(sinfo --noheader --Node --format '%N' | sort -u)
[ -n "$nodes" ] || { echo "targets.sh: sinfo names no node; $file stays as it is" >&2; exit 1; }

# In one move: Prometheus may read at any time.
new=$(mktemp "$file.XXXXXX")
trap 'rm -f "$new"' EXIT
printf '%s\n' "$nodes" | awk -v port="$port" '
  BEGIN { printf "[" }
  { printf "%s\n  {\"targets\": [\"%s:%s\"], \"labels\": {\"instance\": \"%s\"}}", (NR > 1 ? "," : ""), $1, port, $1 }
  END { print "\n]" }
' >"$new"
chmod 644 "$new"
mv "$new" "$file"
