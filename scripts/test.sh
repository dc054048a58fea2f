#!/usr/bin/env bash
# All tests, in three streams beside each other: those with processes, and those on a cluster, wait
# most of the time; those without either compute. What a stream has said is shown when it has ended,
# and what has failed in any of them once more at the very end.
#
#   bash scripts/test.sh .venv
set -uo pipefail
pytest=("$1/bin/pytest" -rfEs -p no:cacheprovider --durations=40 --durations-min=5)
late=(tests/process/test_{checks,conformance,examples}.py)
said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
set -m # else the two would ignore an interrupt
# tests/local has a process of its own: a fork of the one that has run all unit tests, with torch and
# its threads, sometimes ended with a segmentation fault before its exec.
computing() {
    nice -n 10 "${pytest[@]}" tests/unit tests/stateful
    local code=$?
    nice -n 10 "${pytest[@]}" tests/local || code=1
    return $code
}
computing >"$said/unit" 2>&1 &
unit=$!
both() { # the streams end at about the same time
    "${pytest[@]}" tests/cluster
    local code=$?
    "${pytest[@]}" "${late[@]}" || code=1
    return $code
}
both >"$said/cluster" 2>&1 &
cluster=$!
set +m
trap 'kill -INT -- "-$unit" "-$cluster" 2>/dev/null' INT TERM
"${pytest[@]}" tests --ignore=tests/unit --ignore=tests/local --ignore=tests/stateful \
    --ignore=tests/cluster "${late[@]/#/--ignore=}" 2>&1 |
    tee -i "$said/process"
code=$?
for stream in unit cluster; do
    wait "${!stream}" || code=1
    cat "$said/$stream"
done
if ((code)); then
    echo "Failed:"
    grep -hE '^(FAILED|ERROR) ' "$said"/* || echo "no test by itself: see the ends of the streams above"
fi
exit $code
