"""Become the daemon in its unit's sandbox, as far as that goes without systemd; then run the command given.

    python sandbox.py UID FOLDER KEEP:KEEP... COMMAND...

Started as root in a mount namespace of its own (`unshare --mount`).  FOLDER is the unit's RuntimeDirectory, the only
place that can be written beside a private /tmp.  KEEP are folders that must be seen though they are below /tmp, as a
checkout or an interpreter may be.  All else is read-only (mount_setattr(2)); no capability is left and none can come.
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1

libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source, target, kind=None, flags=0):
    named = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    check(libc.mount(*named, ctypes.c_ulong(flags), None))


def main(uid, folder, keep, *command):
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    kept = [(path, os.open(path, os.O_PATH)) for path in keep.split(":") if path.startswith("/tmp/")]
    attributes = struct.pack("4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes)))
    mount("tmpfs", "/tmp", "tmpfs")
    Path("/tmp").chmod(0o1777)
    for path, number in kept:
        Path(path).mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{number}", path, flags=MS_BIND | MS_REC)
        os.close(number)
    mount("tmpfs", folder, "tmpfs")
    os.chown(folder, int(uid), int(uid))
    Path(folder).chmod(0o755)
    os.chdir(keep.partition(":")[0])
    drop = ["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--clear-groups"]
    os.execvp("setpriv", ["setpriv", f"--reuid={uid}", f"--regid={uid}", *drop, *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
