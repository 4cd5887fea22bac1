"""Child processes of the tests start in a tenth of a second: forked by a server that has imported what they import.

A `vllm serve` is three processes and a verl job a dozen, each of which imports torch, vLLM and more: ten seconds of
one core for every one of them. `started(modules)` starts a server. A process that has the variables which it gives
imports `warm/sitecustomize.py` first, which hands the program over. What a program sees is as before (files, folder,
environment, arguments, `__main__`, what Python says is its parent), but it leads a session of its own and its parent is
the server. It ends when the process it stands for is killed.

    with started(["vllm.v1.engine.core"]) as variables:
        subprocess.run([sys.executable, "-m", "program"], env={**os.environ, **variables})
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("warm")
VARIABLE = "ROLLSPEC_TEST_WARM"


@contextlib.contextmanager
def started(modules: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """The variables of processes that are to be forked from a server that has imported `modules`, while it is there.

    Args:
        modules: those that read the environment when they are imported read this process's and `env`.
    """
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        address = f"{folder}/warm"
        found = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))  # what is imported here can be imported there
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__)), address, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, **(env or {}), "PYTHONPATH": found}, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None and "ready\n" in server.stdout, f"the server of {modules} did not start"
            yield {VARIABLE: address, "PYTHONPATH": path}
        finally:
            server.communicate()  # closes its standard input, which ends it


def serve(address: str) -> dict[str, Any]:
    """Fork a child for every task that comes, and return the task in the child. Tell who asked when a child ends, and
    end a child whose asker is gone; end all of them and this process once who started it is gone.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ended, wake = socket.socketpair()
    ended.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    # Children that collect garbage do not look through, and copy, all that was imported; vLLM's would when they end.
    gc.freeze()
    gc.unfreeze = lambda: None
    print("ready", flush=True)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([sys.stdin, listener, ended, *children.values()], [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                ended.recv(4096)
        for pid in [pid for pid, asker in children.items() if asker in ready or sys.stdin in ready]:
            for end in (os.kill, os.killpg):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
            children.pop(pid).close()
        if sys.stdin in ready:
            os._exit(0)
        if listener in ready:
            asker, _ = listener.accept()
            try:
                task, files = receive(asker)
            except OSError:  # it was ended meanwhile
                asker.close()
                continue
            if (pid := os.fork()) == 0:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (listener, ended, wake, asker, *children.values()):
                    own.detach()  # or it would close, when it is collected, whatever has its number by then
                place(files, task["files"])
                return task
            for n in files:
                os.close(n)
            children[pid] = asker
            with contextlib.suppress(OSError):
                asker.sendall(str(pid).encode())
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (gone := children.pop(pid, None)) is not None:
                with contextlib.suppress(OSError):
                    gone.sendall(str(status).encode())
                gone.close()


def receive(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A task, and the files that came with it."""
    size = array.array("i").itemsize
    length, rights, _, _ = asker.recvmsg(4, socket.CMSG_SPACE(250 * size))
    files = array.array("i")
    for _, _, data in rights:
        files.frombytes(data[: len(data) - len(data) % size])
    missing, text = int.from_bytes(length, "little"), b""
    while len(text) < missing:
        if not (part := asker.recv(missing - len(text))):
            raise ConnectionResetError
        text += part
    return json.loads(text), list(files)


def place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the files the numbers they had, and close everything else."""
    import fcntl

    high = [fcntl.fcntl(n, fcntl.F_DUPFD, 2000) for n in files]
    os.closerange(0, 2000)
    for n, number in zip(high, numbers, strict=True):
        os.dup2(n, number)
    os.closerange(2000, 2000 + 2 * len(high) + 64)


def settle(task: Mapping[str, Any]) -> None:
    """Be in the folder and the environment of who asked."""
    os.chdir(task["cwd"])
    os.getppid = lambda: parent_of(task["pid"])
    os.environ.clear()
    os.environ.update(task["env"])
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    importlib.invalidate_caches()
    if (torch := sys.modules.get("torch")) is not None and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read when it was imported
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def parent_of(pid: int) -> int:
    """Of the process that asked: who it is a child of, and 1 once that one is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def run(args: list[str]) -> None:
    """As `python ARGS`."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if args[0] == "-m":
        sys.argv = args[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = args
        path = Path(args[0])
        sys.path.insert(0, str(path.parent.resolve()))
        main.__file__ = args[0]
        exec(compile(path.read_bytes(), args[0], "exec"), main.__dict__)


def leave(program: Callable[[list[str]], None], args: list[str]) -> None:
    """Run the program and end the process as Python does, but without taking apart all that was imported: seconds."""
    code: Any = 0
    try:
        program(args)
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 255)


if __name__ == "__main__":
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    _task = serve(sys.argv[1])
    settle(_task)
    leave(run, _task["args"])
