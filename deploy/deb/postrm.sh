#!/bin/sh
# Forgets the unit; `purge` also removes recordings and /etc/pacecar.  The account stays, as Debian requires: its number
# must not be reused by another account.
set -e

if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
  systemctl --system daemon-reload >/dev/null || true
fi
if [ "$1" = purge ]; then
  if [ -x "$DPKG_ROOT/usr/bin/deb-systemd-helper" ]; then
    deb-systemd-helper purge pacecar.service >/dev/null || true
    deb-systemd-helper unmask pacecar.service >/dev/null || true
  fi
  rm -rf "$DPKG_ROOT/etc/pacecar" "$DPKG_ROOT/var/lib/pacecar" "$DPKG_ROOT/var/lib/private/pacecar"
fi
