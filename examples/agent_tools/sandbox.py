"""Runs a program of the policy's in a process of its own, with bounds of time, memory and output, and no way out of it.

    run("print(6 * 7)")            # "42"
    run("while True: pass")        # "error: no end within 2 seconds"

The process has no environment, an empty folder and the standard library. Limits of the kernel bound its processor time,
memory and files; an audit hook, which cannot be taken off again, ends the program where it opens a file or a socket,
starts a process or reaches for foreign code. That keeps a policy that explores from harm by accident. It is no wall
against an attacker: put a job whose policy you do not trust into a container without a network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

SECONDS = 2
MEMORY = 256 << 20  # bytes
OUTPUT = 1 << 16  # bytes that may be printed
MOST_TEXT = 200  # characters of an answer, and of a calculator's expression

_CHILD = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({OUTPUT}, {OUTPUT}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def bound():
    library = tuple(p for p in sys.path if p)
    closed = ("socket.", "subprocess.", "os.", "ctypes.", "shutil.", "pty.", "signal.", "winreg.", "mmap.", "fcntl.",
              "resource.", "syslog.", "tempfile.", "urllib.", "ftplib.", "http.", "smtplib.", "sqlite3.", "glob.")
    inside = lambda path: isinstance(path, str) and path.startswith(library) and ".." not in path
    def hook(event, args):
        if event == "open":
            if not inside(args[0]) or (isinstance(args[1], str) and set("wax+") & set(args[1])):
                raise PermissionError("files cannot be opened here")
        elif event in ("os.listdir", "os.scandir"):
            if not inside(args[0]):
                raise PermissionError("folders cannot be read here")
        elif event == "import" and args[0] in ("_posixsubprocess", "_ctypes", "_socket"):
            raise PermissionError(args[0] + " cannot be imported here")
        elif event.startswith(closed):
            raise PermissionError(event + " cannot be used here")
    return hook
code = compile(sys.stdin.read(), "program", "exec")
sys.addaudithook(bound())
del bound, resource
exec(code, {{"__name__": "__main__"}})
"""


def run(code: str) -> str:
    """What `code` prints, cut to `MOST_TEXT` characters; ``error:`` and the reason where it fails. Raises nothing."""
    try:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
            try:
                done = subprocess.run(
                    # -I: no environment, no site of the user's; -S: no installed packages.
                    [sys.executable, "-I", "-S", "-c", _CHILD],
                    input=code.encode("utf-8", "replace"),
                    stdout=out,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env={},
                    timeout=SECONDS + 1,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"error: no end within {SECONDS} seconds"
            out.seek(0)
            text = out.read(4 * MOST_TEXT).decode("utf-8", "replace").strip()
    except OSError as e:
        return f"error: the program was not started ({e.strerror})"
    if done.returncode < 0:  # the kernel's limit of processor time, or of memory where no error could be raised
        return f"error: no end within {SECONDS} seconds, or more than {MEMORY >> 20} MB"
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it failed"]
        return f"error: {last[-1][:MOST_TEXT]}"
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " ..."
