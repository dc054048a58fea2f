#!/usr/bin/env bash
# Tests with other versions of Python and torch, or with the oldest libraries of pyproject.toml.
#
#   bash scripts/matrix.sh constraints            Python 3.11, 3.12 and 3.13, versions of constraints.txt
#   bash scripts/matrix.sh lowest                 the oldest Python, the lower bounds of pyproject.toml
#   bash scripts/matrix.sh constraints 3.12       that Python only
#   bash scripts/matrix.sh torch                  torch 2.6, 2.9, 2.13 and 2.15: some of the tests
#   bash scripts/matrix.sh torch 2.15             that torch only
#
# Each has a virtual environment of its own below .matrix/. uv fetches a Python that is not there.
set -euo pipefail
versions=${1:?expected constraints, lowest or torch}
shift

# What depends on torch: its parser, its state and its restarts, on the newest versions of the rest.
torch_tests=(
    tests/unit/test_flags.py tests/unit/test_visible.py tests/unit/test_torch_names.py
    tests/unit/test_restore.py tests/unit/test_state.py tests/unit/test_staging.py
    tests/unit/test_memory_ranges.py tests/unit/test_replica_check.py tests/local/test_affinity.py
    tests/local/test_checkpointer.py::test_a_checkpoint_is_loaded_by_another_version_of_torch
    "tests/process/test_conformance.py::test_a_script_finds_the_same_world[script]"
    "tests/process/test_dropin.py::test_a_restart_is_one_line[False]"
)

# Usage: torch_row VERSION. The tests, and checkpoints from and to the torch of .venv.
torch_row() {
    local venv=.matrix/torch-$1
    echo "matrix: torch $1"
    .venv/bin/python -m uv venv --quiet --clear --python .venv/bin/python "$venv"
    # torch chooses the versions of these itself.
    .venv/bin/python -m uv pip install --quiet --compile-bytecode --python "$venv/bin/python" \
        -c <(grep -vE '^(torch|triton|sympy|nvidia-|cuda-)' constraints.txt) \
        "torch==$1.*" -e ".[dev,examples]"
    OTHER_PYTHON=.venv/bin/python "$venv/bin/python" -m pytest -q -p no:cacheprovider \
        "${torch_tests[@]}"
}

case $versions in
torch)
    failed=()
    [ $# != 0 ] || set -- 2.6 2.9 2.13 2.15
    for version in "$@"; do
        torch_row "$version" || failed+=("$version")
    done
    if ((${#failed[@]})); then
        echo "matrix: failed with torch ${failed[*]}" >&2
        exit 1
    fi
    exit
    ;;
constraints) options=(-c constraints.txt) pythons=(3.11 3.12 3.13) ;;
lowest) options=(--resolution lowest-direct) pythons=(3.11) ;;
*)
    echo "matrix: found $versions, expected constraints, lowest or torch" >&2
    exit 2
    ;;
esac
[ $# = 0 ] || pythons=("$@")
failed=()
for python in "${pythons[@]}"; do
    venv=.matrix/$versions-$python
    echo "matrix: Python $python, $versions"
    .venv/bin/python -m uv venv --quiet --clear --python "$python" "$venv"
    .venv/bin/python -m uv pip install --quiet --python "$venv/bin/python" "${options[@]}" \
        -e ".[dev,docs,examples]"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit tests/local || failed+=("$python")
done
if ((${#failed[@]})); then
    echo "matrix: failed with Python ${failed[*]}" >&2
    exit 1
fi
