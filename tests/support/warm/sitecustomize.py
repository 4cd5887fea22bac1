"""Hands what this process is to run to a server that has imported it already (warm_server.py), and waits for its end.

Python imports this module in every process that has its folder on PYTHONPATH. Where the server is not there, or the
program is none that it takes, the process goes on as any other.
"""

import os
import sys


def taken(args):  # type: ignore[no-untyped-def]
    """Whether the server runs this: a module, a script, or code, which is also what multiprocessing spawns."""
    if args[:1] == ["-m"]:
        return len(args) > 1
    if args and args[0].endswith(".py"):
        # Ray's programs are left to themselves: its workers do not reach its servers when they are forked, and its
        # agents look whether they are children of the raylet.
        return f"{os.sep}ray{os.sep}" not in args[0]
    return args[:1] == ["-c"] and "resource_tracker" not in args[1]


def hand_over(address, args):  # type: ignore[no-untyped-def]
    """Have the server run it with this process's files, folder and environment; end as it ends."""
    import array
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:
        return
    own = server.fileno()
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [n for n in files if n != own and os.path.exists(f"/proc/self/fd/{n}")]
    task = json.dumps(
        {"args": args, "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(), "files": files}
    ).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    server.sendmsg([len(task).to_bytes(4, "little")], rights)
    server.sendall(task)
    child = int(server.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: os.kill(child, n))
    # A process that waits for the end of a file waits for the program, not for this process.
    for n in files:
        os.close(n)
    status = int(server.recv(64) or 9)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if address := os.environ.get("ROLLSPEC_TEST_WARM"):
    rest = sys.orig_argv[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
    if taken(rest):
        hand_over(address, rest)
