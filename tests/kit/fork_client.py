"""What forking_python() makes a program of, with SOCKET and PYTHON set above: asks the server there for a child.

It ends as the child does.  Imports nothing that takes time; python's own start is most of what it costs.
"""

import _signal
import _socket
import marshal
import os
import sys

# Read by python or torch when they start, before a forked child could be told.
AT_START = (
    "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONPROFILEIMPORTTIME", "PYTHONHASHSEED",
    "PYTHONTRACEMALLOC", "PYTHONNOUSERSITE", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONIOENCODING", "PYTHONUTF8",
    "PYTHONOPTIMIZE", "PYTHONVERBOSE", "PYTHONINSPECT", "LD_PRELOAD", "LD_LIBRARY_PATH",
    "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
)  # fmt: skip
PASSED_ON = (1, 2, 3, 10, 12, 15, 18)  # HUP INT QUIT USR1 USR2 TERM CONT

arguments = sys.argv[1:]
is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
while arguments and arguments[0] in ("-u", "-s", "-B"):
    is_unbuffered |= arguments.pop(0) == "-u"
is_plain = len(arguments) > 1 and arguments[0] in ("-m", "-c")
is_plain |= bool(arguments) and not arguments[0].startswith("-") and os.path.isfile(arguments[0])
if not is_plain or any(name in os.environ for name in AT_START):
    os.execv(PYTHON, [PYTHON, *sys.argv[1:]])

sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
sock.connect(SOCKET)
files = []
for name in os.listdir("/proc/self/fd"):
    number = int(name)
    if number != sock.fileno():
        try:
            os.fstat(number)  # the listing's own is closed by now
        except OSError:
            continue
        files.append(number)
signals = [n for n in range(1, 32) if n not in (9, 19) and _signal.getsignal(n) == _signal.SIG_IGN and n != 13]
umask = os.umask(0o022)
is_leader = os.getsid(0) == os.getpid()
asked = marshal.dumps((arguments, dict(os.environ), os.getcwd(), umask, is_unbuffered, files, signals, is_leader))
numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)  # one that comes before the child can be told of it waits
sock.sendmsg([len(asked).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
sock.sendall(asked)
for number in PASSED_ON:  # those ignored here, too: the child ignores them until it wants to hear them
    _signal.signal(number, lambda number, frame: sock.send(bytes([number])))
_signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
for number in files:
    os.close(number)  # who reads the child's output hears of its end from the child alone
answer = b""
while len(answer) < 4:
    more = sock.recv(4 - len(answer))
    if not more:
        os._exit(70)  # the server is gone
    answer += more
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
