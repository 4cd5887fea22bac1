#!/usr/bin/env bash
# Runs the named test stages, each within a time limit, and ends with one line: `N passed, N failed`.
#
#   scripts/test.sh lint unit engine e2e
#   scripts/test.sh unit -k config -x        (arguments from the first dash on go to pytest)
#
#   scripts/test.sh modes                    (of the slow ones, those that CI runs: trainer modes, trained heads)
#   scripts/test.sh slow                     (long sweeps, marked `slow`, that lint to e2e leave out)
#
# ROLLSPEC_TEST_WORKERS: test files that run at the same time (2 where there are two cores; not for whole jobs).
#
# A stage that fails does not stop the later ones: one run shows everything. A failed static check counts as one failure.
# What was skipped is printed with its reason before the counts, and how many slow tests were left out.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

declare -A LIMIT=([unit]=1200 [engine]=3000 [e2e]=3000 [modes]=2400 [slow]=9000)
# Engines mostly wait for imports and for each other: two at a time, with one thread each, take little more than one.
workers="${ROLLSPEC_TEST_WORKERS:-$(($(nproc) > 1 ? 2 : 1))}"
# Whole jobs keep both cores busy: two at a time took as long as one after the other.
declare -A SPREAD=([unit]="-n $workers" [engine]="-n $workers --dist loadfile" [e2e]="" [modes]="" [slow]="")
declare -A FILES=([unit]="tests/unit tests/kernels" [engine]=tests/engine [e2e]=tests/e2e [modes]="tests/engine tests/e2e"
    [slow]="tests/engine tests/e2e")
passed=0
failed=0
skipped=0
deselected=0
reasons="$(mktemp)"
trap 'rm -f "$reasons"' EXIT
timings=()
stages=()
while (($#)) && [[ "$1" != -* ]]; do
    stages+=("$1")
    shift
done

check() {
    local name="$1" start=$SECONDS
    shift
    echo "=== $name"
    # INT, not TERM: pytest then tears its fixtures down and still prints what it has.
    timeout --foreground -s INT -k 30 600 "$@" || failed=$((failed + 1))
    timings+=("$(printf '%5d s  %s' "$((SECONDS - start))" "$name")")
}

count() { # count WORD FILE: the number before WORD in pytest's closing line
    grep -E '[0-9]+ (passed|failed|error|skipped|deselected|xfailed|warning)|no tests ran' "$2" | tail -n 1 |
        grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0
}

run_pytest() {
    local stage="$1" start=$SECONDS log status
    shift
    echo "=== pytest $stage"
    log="$(mktemp)"
    local threads="${OMP_NUM_THREADS:-2}" which="not slow"
    # With more threads than cores every operation waits for one that is not running.
    [[ -n "${SPREAD[$stage]}" ]] && ((workers > 1)) && threads=1
    [[ "$stage" == slow || "$stage" == modes ]] && which="$stage"
    # shellcheck disable=SC2086 # several words, or none
    env OMP_NUM_THREADS="$threads" timeout --foreground -s INT -k 30 "${LIMIT[$stage]}" \
        python -m pytest ${FILES[$stage]} ${SPREAD[$stage]} -m "$which" -r s "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    passed=$((passed + $(count passed "$log")))
    skipped=$((skipped + $(count skipped "$log")))
    deselected=$((deselected + $(count deselected "$log")))
    grep -E '^SKIPPED \[[0-9]+\] ' "$log" >>"$reasons"
    local bad=$(($(count failed "$log") + $(count 'error' "$log")))
    if ((status == 124 || status == 137)); then
        echo "$stage was stopped at its limit of ${LIMIT[$stage]} s" >&2
    fi
    # A run that broke off, or found no test at all, is a failure even where no test failed.
    ((status != 0 && bad == 0)) && bad=1
    failed=$((failed + bad))
    rm -f "$log"
    timings+=("$(printf '%5d s  %s' "$((SECONDS - start))" "pytest $stage")")
}

for stage in "${stages[@]}"; do
    case "$stage" in
    lint)
        check "ruff check" ruff check .
        check "ruff format" ruff format --check .
        check "mypy" mypy
        check "imports" lint-imports --no-cache
        check "vLLM's signatures" python scripts/check_vllm.py
        check "stale results" python -m benchmarks.stale
        check "shellcheck" shellcheck scripts/*.sh .ci/run
        ;;
    unit | engine | e2e | modes | slow) run_pytest "$stage" "$@" ;;
    *)
        echo "scripts/test.sh: there is no stage '$stage'; choose from lint, unit, engine, e2e, modes, slow." >&2
        exit 2
        ;;
    esac
done
echo "=== time"
printf '%s\n' "${timings[@]}"
printf '%5d s  in all\n' "$SECONDS"
if ((skipped)); then
    echo "=== $skipped skipped"
    cat "$reasons"
fi
((deselected)) && echo "=== $deselected deselected: slow ones (make test-slow), and what the arguments left out"
echo "$passed passed, $failed failed"
((failed == 0))
