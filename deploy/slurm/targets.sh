#!/bin/sh
# Writes a Slurm cluster's nodes as Prometheus targets (prometheus/slurm.yml).  From cron or a timer, where sinfo works:
#   targets.sh /etc/prometheus/targets/pacecar.json
# Includes nodes that are down in Slurm, so that Prometheus reports that it cannot scrape them.
set -eu

file=${1:?usage: targets.sh FILE [PORT]}
port=${2:-9850}

nodes=$(sinfo --noheader --Node --format '%N' | sort -u)
[ -n "$nodes" ] || { echo "targets.sh: sinfo lists no node; $file is unchanged" >&2; exit 1; }

# Atomically, because Prometheus may read at any time.
new=$(mktemp "$file.XXXXXX")
trap 'rm -f "$new"' EXIT
printf '%s\n' "$nodes" | awk -v port="$port" '
  BEGIN { printf "[" }
  { printf "%s\n  {\"targets\": [\"%s:%s\"], \"labels\": {\"instance\": \"%s\"}}", (NR > 1 ? "," : ""), $1, port, $1 }
  END { print "\n]" }
' >"$new"
chmod 644 "$new"
mv "$new" "$file"
