#!/bin/sh
# Refuses to unpack over an installation that pip made at the same place: files of both would be mixed.
set -e

if [ -e "$DPKG_ROOT/opt/pacecar/pyvenv.cfg" ]; then
  echo "pacecar: /opt/pacecar is a virtual environment that was made by hand: remove it first (rm -r /opt/pacecar)" >&2
  exit 1
fi
