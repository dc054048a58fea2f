#!/usr/bin/env bash
# All tests, in two streams beside each other: those with processes and clusters wait most of the
# time, those without compute.
#
#   bash scripts/test.sh .venv
set -uo pipefail
venv=$1
quick=$(mktemp)
nice -n 10 "$venv/bin/pytest" -rs -p no:cacheprovider tests/unit tests/stateful >"$quick" 2>&1 &
beside=$!
"$venv/bin/pytest" -rs --durations=60 --durations-min=5 tests --ignore=tests/unit --ignore=tests/stateful
code=$?
wait "$beside"
quick_code=$?
cat "$quick"
rm -f "$quick"
exit $((code > quick_code ? code : quick_code))
