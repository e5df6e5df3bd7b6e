#!/bin/sh
# Refuses to unpack over a virtual environment in the same place, which would mix the files of both.
set -e

if [ -e "$DPKG_ROOT/opt/pacecar/pyvenv.cfg" ]; then
  echo "pacecar: /opt/pacecar is a virtual environment; remove it first (rm -r /opt/pacecar)" >&2
  exit 1
fi
