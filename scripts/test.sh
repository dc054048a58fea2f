#!/usr/bin/env bash
# All tests, in three streams beside each other: one for the tests that compute, one for those on a
# cluster, and one for those with processes. Tests with processes wait most of the time. A stream
# that has done its own tests takes files with processes too, so all streams end at about the same
# time. What a stream has said is shown when it has ended, and what has failed in any of them once
# more at the very end.
#
#   bash scripts/test.sh .venv
set -uo pipefail
pytest=("$1/bin/pytest" -rfEs -p no:cacheprovider --durations=40 --durations-min=5)
# The files that take longest come first.
queue=(tests/process/test_{flash,examples,membership,huggingface,deepspeed,sharded_data}.py
    tests/process/test_{operator,replicas,conformance,reshard,dropin,persist}.py
    tests/browser tests/contracts tests/process/test_*.py)
# Once, here: where nothing may be written later, each process compiles our modules anew.
"$1/bin/python" -m compileall -q -j 0 dlrover_py agent operator tests
said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
set -m # else the streams in the background would ignore an interrupt

run() { # pytest, unless somebody has interrupted it before
    [ -e "$said/interrupted" ] && return
    "${pytest[@]}" "$@" && return
    [ $? = 2 ] && touch "$said/interrupted"
    touch "$said/failed"
}
take_files() { # runs files of the queue until none is left
    local file
    for file in "${queue[@]}"; do
        # Only one stream can make the folder.
        mkdir "$said/taken-${file//\//-}" 2>/dev/null && run "$file"
    done
}
# tests/local has a process of its own: a fork of the one that has run all unit tests, with torch and
# its threads, sometimes ended with a segmentation fault before its exec.
(
    pytest=(nice -n 10 "${pytest[@]}")
    run tests/unit tests/stateful
    run tests/local
    take_files
) >"$said/unit" 2>&1 &
unit=$!
(
    run tests/cluster
    take_files
) >"$said/cluster" 2>&1 &
cluster=$!
set +m
trap 'kill -INT -- "-$unit" "-$cluster" 2>/dev/null' INT TERM
take_files 2>&1 | tee -i "$said/process"
for stream in unit cluster; do
    wait "${!stream}"
    cat "$said/$stream"
done
if [ -e "$said/failed" ]; then
    echo "Failed:"
    grep -hE '^(FAILED|ERROR) ' "$said"/{unit,cluster,process} ||
        echo "no test by itself: see the ends of the streams above"
    exit 1
fi
