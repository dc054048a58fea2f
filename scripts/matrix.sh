#!/usr/bin/env bash
# Tests with other versions of Python and torch, or with the oldest libraries of pyproject.toml.
#
#   bash scripts/matrix.sh constraints            Python 3.11, 3.12 and 3.13, versions of constraints.txt
#   bash scripts/matrix.sh lowest                 the oldest Python, the lower bounds of pyproject.toml
#   bash scripts/matrix.sh constraints 3.12       that Python only
#   bash scripts/matrix.sh torch                  torch 2.6, 2.9, 2.13 and 2.15: some of the tests
#   bash scripts/matrix.sh torch 2.15             that torch only
#   bash scripts/matrix.sh reduced                the oldest torch, as CI does it: fewer tests
#
# Each has a virtual environment of its own below .matrix/. uv fetches a Python that is not there.
set -euo pipefail
versions=${1:?expected constraints, lowest, torch or reduced}
shift
main=${MATRIX_PYTHON:-.venv/bin/python}
oldest_torch=2.6
# What uv says if the network or the registry fails.
network_errors='error sending request|error decoding response body|connection (reset|closed)'
network_errors+='|timed out|network timeout|HTTP status server error'

# What depends on torch: its parser, its state and its restarts, on the newest versions of the rest.
reduced_tests=(
    tests/unit/test_flags.py tests/unit/test_visible.py tests/unit/test_torch_names.py
    tests/unit/test_restore.py tests/unit/test_state.py tests/unit/test_staging.py
    tests/unit/test_torch_format.py tests/unit/test_memory_ranges.py
    tests/unit/test_replica_check.py tests/local/test_store_server.py
    tests/local/test_checkpointer.py::test_a_checkpoint_is_loaded_by_another_version_of_torch
)
torch_tests=(
    "${reduced_tests[@]}" tests/local/test_affinity.py
    "tests/process/test_conformance.py::test_a_script_finds_the_same_world[script]"
    "tests/process/test_dropin.py::test_a_restart_is_one_line[False]"
)

# Usage: install_torch VERSION [PREFIX...]. Makes the environment; uv's cache keeps what it has
# downloaded. The command that downloads is run behind the prefix.
install_torch() {
    "$main" -m uv venv --quiet --clear --python "$main" ".matrix/torch-$1" || return
    # torch chooses the versions of these itself.
    "${@:2}" "$main" -m uv pip install --quiet --python ".matrix/torch-$1/bin/python" \
        -c <(grep -vE '^(torch|triton|sympy|nvidia-|cuda-)' constraints.txt) \
        "torch==$1.*" -e ".[dev,examples]"
}

# Usage: test_torch VERSION TEST... Checkpoints go from and to the torch of the main environment.
# torch 2.6 starts processes of inductor with the first import of it, unless it may use one only.
# It can hang in C++, where no signal ends a test: a thread ends them all after the timeout.
test_torch() {
    local python=.matrix/torch-$1/bin/python
    OTHER_PYTHON=$main TORCHINDUCTOR_COMPILE_THREADS=1 \
        "$python" -m pytest -q -p no:cacheprovider --timeout-method=thread "${@:2}"
}

case $versions in
torch)
    failed=()
    [ $# != 0 ] || set -- "$oldest_torch" 2.9 2.13 2.15
    for version in "$@"; do
        echo "matrix: torch $version"
        { install_torch "$version" && test_torch "$version" "${torch_tests[@]}"; } ||
            failed+=("$version")
    done
    if ((${#failed[@]})); then
        echo "matrix: failed with torch ${failed[*]}" >&2
        exit 1
    fi
    exit
    ;;
reduced)
    # A slow network or none must not hold up the rest of CI: 3 GB to download, and seconds from
    # uv's cache. The environment takes 6.7 GB. Any other failure is one of the project.
    mkdir -p .matrix
    said=.matrix/reduced.log failure=0
    install_torch "$oldest_torch" timeout --foreground -k 10 240 >"$said" 2>&1 || failure=$?
    cat "$said" >&2
    if [ "$failure" = 124 ]; then
        echo "NOT TESTED: torch $oldest_torch could not be installed within 240 s"
        exit
    elif [ "$failure" != 0 ] && grep -qiE "$network_errors" "$said"; then
        echo "NOT TESTED: torch $oldest_torch could not be installed without a network"
        exit
    elif [ "$failure" != 0 ]; then
        echo "matrix: torch $oldest_torch could not be installed (exit code $failure)" >&2
        exit 1
    fi
    test_torch "$oldest_torch" "${reduced_tests[@]}"
    exit
    ;;
constraints) options=(-c constraints.txt) pythons=(3.11 3.12 3.13) ;;
lowest) options=(--resolution lowest-direct) pythons=(3.11) ;;
*)
    echo "matrix: found $versions, expected constraints, lowest, torch or reduced" >&2
    exit 2
    ;;
esac
[ $# = 0 ] || pythons=("$@")
failed=()
for python in "${pythons[@]}"; do
    venv=.matrix/$versions-$python
    echo "matrix: Python $python, $versions"
    "$main" -m uv venv --quiet --clear --python "$python" "$venv"
    "$main" -m uv pip install --quiet --python "$venv/bin/python" "${options[@]}" \
        -e ".[dev,docs,examples]"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit tests/local || failed+=("$python")
done
if ((${#failed[@]})); then
    echo "matrix: failed with Python ${failed[*]}" >&2
    exit 1
fi
