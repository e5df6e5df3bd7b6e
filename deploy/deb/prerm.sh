#!/bin/sh
# Stops the daemon before its removal and deletes the compiled modules.  Jobs continue without a daemon.
set -e

if [ "$1" = remove ] && [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
  deb-systemd-invoke stop pacecar.service >/dev/null || true
fi
find "$DPKG_ROOT/opt/pacecar/lib" -depth -name __pycache__ -type d -exec rm -r {} +
