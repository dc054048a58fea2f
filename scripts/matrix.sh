#!/usr/bin/env bash
# The unit tests with other versions of Python, or with the oldest libraries that pyproject.toml allows.
#
#   bash scripts/matrix.sh constraints            Python 3.11, 3.12 and 3.13, versions of constraints.txt
#   bash scripts/matrix.sh lowest                 the oldest Python, the lower bounds of pyproject.toml
#   bash scripts/matrix.sh constraints 3.12       that Python only
#
# Each has a virtual environment of its own below .matrix/. uv fetches a Python that is not there.
set -euo pipefail
versions=${1:?expected constraints or lowest}
shift
case $versions in
constraints) options=(-c constraints.txt) pythons=(3.11 3.12 3.13) ;;
lowest) options=(--resolution lowest-direct) pythons=(3.11) ;;
*)
    echo "matrix: found $versions, expected constraints or lowest" >&2
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
