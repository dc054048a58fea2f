#!/usr/bin/env bash
# All checks and tests, in three streams beside each other: one for the checks and the tests that
# compute, one for those on a cluster, and one for those with processes. Tests with processes wait
# most of the time. A stream that has done its own tests takes those of others, part by part, so all
# streams end at about the same time. What a stream has said is shown when it has ended, and what has
# failed in any of them, or was not tested, once more at the very end.
#
# The checks and what the tests need (a cluster, a browser) come beside the first tests, as these
# take minutes and much of that is waiting. If one of them fails, no further test begins.
#
# With DLROVER_TEST_MINUTES=N, no file with processes begins after N minutes, and no test on a cluster
# after twice as many. Those that are left are named at the end. For each commit it is other files
# that come last, and each day other tests on the cluster. So a slow machine has a result in time,
# and each test is run for some commit. All of it is interrupted after 2.6 times as many minutes, and
# what has hung shows where it was.
#
#   bash scripts/test.sh .venv
set -uo pipefail
venv=$1
# A test that hangs in C code is not ended by its own timeout, as no signal handler of Python runs.
# Then all tests of the process end. No test may take so long.
pytest=("$venv/bin/pytest" -rfEs -p no:cacheprovider --durations=40 --durations-min=5
    -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true)
minutes=${DLROVER_TEST_MINUTES:-0}
others=(tests/process/test_*.py)
if [ "$minutes" = 0 ]; then # the files that take longest come first
    queue=(tests/process/test_{exact_data,flash,examples,membership,operator,replicas}.py
        tests/process/test_{conformance,reshard,dropin,persist,exact_frameworks}.py "${others[@]}")
else
    export DLROVER_CLUSTER_TESTS_UNTIL=$(($(date +%s) + minutes * 120))
    commit=$(git rev-parse --short=7 HEAD 2>/dev/null || date +%j)
    mapfile -t queue < <(for file in "${others[@]}"; do
        echo "$(md5sum <<<"$commit $file")$file"
    done | sort | sed 's/^.*-//')
fi
computing=(tests/unit/test_*.py tests/stateful/test_*.py)
parts=6 # of the tests that compute: each imports torch anew
# Once, here: where nothing may be written later, each process compiles our modules anew.
"$venv/bin/python" -m compileall -q -j 0 dlrover_py agent operator tests
said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
set -m # else the streams in the background would ignore an interrupt

run() { # pytest, unless somebody has interrupted it before
    [ -e "$said/interrupted" ] && return
    "${pytest[@]}" "$@" && return
    [ $? = 2 ] && touch "$said/interrupted"
    touch "$said/failed"
}
first() { # what the tests of a stream need
    "$@" && return
    touch "$said/failed" "$said/interrupted"
    echo "FAILED $*"
}
oldest_torch() { # some tests with the oldest torch, in an environment of its own
    [ -e "$said/interrupted" ] && return
    MATRIX_PYTHON=$venv/bin/python nice -n 10 bash scripts/matrix.sh reduced && return
    touch "$said/failed"
    echo "FAILED scripts/matrix.sh reduced"
}
prepared() { # waits for what is built for the cluster: the stream that builds may have been killed
    for _ in {1..3600}; do
        [ -e "$said/prepared" ] || [ -e "$said/interrupted" ] && break
        sleep 1
    done
}
take() { # NAME COMMAND...: runs a command, unless another stream has taken what has this name
    # Only one stream can make the folder.
    mkdir "$said/taken-$1" 2>/dev/null && "${@:2}"
}
take_parts() { # runs what computes, part by part: each has every $parts-th file
    local part i files
    for ((part = 0; part < parts; part++)); do
        files=()
        for ((i = part; i < ${#computing[@]}; i += parts)); do files+=("${computing[i]}"); done
        take "part-$part" run "${files[@]}"
    done
    take torch oldest_torch
    prepared
    # tests/local has a process of its own: a fork of the one that has run all unit tests, with torch
    # and its threads, sometimes ended with a segmentation fault before its exec.
    take local run tests/local
}
take_files() { # runs files with processes until none is left
    local file
    for file in "${queue[@]}"; do
        [ "$minutes" -gt 0 ] && [ "$SECONDS" -ge $((minutes * 60)) ] && return
        take "${file//\//-}" run "$file"
    done
}
(
    pytest=(nice -n 10 "${pytest[@]}")
    first nice -n 10 make --no-print-directory VENV="$venv" check
    take_parts
    take_files
) >"$said/unit" 2>&1 &
unit=$!
(
    # One after the other: they install packages.
    first bash scripts/browser.sh
    first bash scripts/prometheus.sh
    first nice -n 10 "$venv/bin/python" -m tests.cluster.lab prepare
    touch "$said/prepared"
    run tests/contracts
    run tests/cluster
    run tests/browser
    take_parts
    take_files
) >"$said/cluster" 2>&1 &
cluster=$!
(
    take_files
    take_parts
) >"$said/process" 2>&1 &
process=$!
interrupt() { kill -"$1" -- "-$unit" "-$cluster" "-$process" 2>/dev/null; }
late=
if [ "$minutes" -gt 0 ]; then
    (
        sleep $((minutes * 156))
        echo "FAILED scripts/test.sh: no end in time; what runs:" >"$said/late"
        ps -e -o pgid=,etime=,args= | cut -c 1-200 |
            awk -v g="$unit $cluster $process" 'index(" " g " ", " " $1 " ")' >>"$said/late"
        touch "$said/failed" "$said/interrupted"
        interrupt INT
        sleep 120
        interrupt KILL
    ) &
    late=$!
fi
set +m
trap 'touch "$said/failed" "$said/interrupted"; interrupt INT' INT TERM
touch "$said/process"
shown= # an interrupt ends this command, too
tail -n +1 -s 0.2 -f --pid="$process" "$said/process" && shown=process
for stream in process unit cluster; do
    wait "${!stream}"
    [ $? -le 128 ] || touch "$said/failed" # it was killed
    [ "$stream" = "$shown" ] || cat "$said/$stream"
done
[ -z "$late" ] || kill -- "-$late" 2>/dev/null
if [ -e "$said/failed" ]; then
    cat "$said/late" 2>/dev/null
    echo "Failed:"
    grep -hE '^(FAILED|ERROR) ' "$said"/{unit,cluster,process} ||
        echo "no test by itself: see the ends of the streams above"
fi
grep -hoE '(^|: )NOT TESTED.*' "$said"/{unit,cluster,process} | sed 's/^: //'
for file in "${others[@]}"; do
    [ -e "$said/interrupted" ] || [ -e "$said/taken-${file//\//-}" ] ||
        echo "NOT TESTED $file: $minutes minutes had passed (DLROVER_TEST_MINUTES)"
done
[ ! -e "$said/failed" ]
