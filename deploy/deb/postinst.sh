#!/bin/sh
# Creates the account, compiles the modules (the daemon cannot write there), and enables and starts the daemon.
set -e

if [ "$1" = configure ]; then
  systemd-sysusers ${DPKG_ROOT:+--root="$DPKG_ROOT"} pacecar.conf
  # Modules also work without being compiled, so a failure must not leave the package half installed.
  python3 -I -m compileall -q ${DPKG_ROOT:+-s "$DPKG_ROOT"} "$DPKG_ROOT/opt/pacecar/lib" || true
fi

# As debhelper's dh_installsystemd does: units that an administrator disabled or masked stay so.
if [ "$1" = configure ] || [ "$1" = abort-upgrade ] || [ "$1" = abort-deconfigure ] || [ "$1" = abort-remove ]; then
  deb-systemd-helper unmask pacecar.service >/dev/null || true
  if deb-systemd-helper --quiet was-enabled pacecar.service; then
    deb-systemd-helper enable pacecar.service >/dev/null || true
  else
    deb-systemd-helper update-state pacecar.service >/dev/null || true
  fi
  if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload >/dev/null || true
    if [ -n "$2" ]; then action=restart; else action=start; fi
    deb-systemd-invoke "$action" pacecar.service >/dev/null || true
  fi
fi
