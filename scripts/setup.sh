#!/usr/bin/env bash
# Makes the virtual environment: Python 3.11 or newer, uv (it installs torch in seconds), and this
# project with all that its tests and examples need, at the versions of constraints.txt.
set -euo pipefail
venv=${1:-.venv}

python=
for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -q && apt-get install -qy python3 python3-venv
        python=python3
    else
        echo "setup: Python 3.11, 3.12 or 3.13 is needed; install it and run make setup again" >&2
        exit 2
    fi
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -q && apt-get install -qy python3-venv # Debian keeps it apart
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if ! "$venv/bin/python" -m uv --version >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
fi
echo "setup: installing into $venv (torch is large: this takes a minute or two)"
"$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" \
    -c constraints.txt -e '.[dev,examples]'
# Once, here: where nothing may be written later each process compiles torch anew, 2 to 3 s of CPU.
# (A file or two of the libraries are templates, and no Python.)
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages >/dev/null || true
echo "setup: done; try: source $venv/bin/activate && dlrover --help"
