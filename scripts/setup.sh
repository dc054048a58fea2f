#!/usr/bin/env bash
# Makes the virtual environment with Python 3.11, 3.12 or 3.13, at the versions of constraints.txt.
#
#   bash scripts/setup.sh VENV build    uv alone: enough for a wheel
#   bash scripts/setup.sh VENV user     this project, torch, and what the examples need
#   bash scripts/setup.sh VENV dev      that, and what tests, checks and the site of docs/ need
set -euo pipefail
venv=${1:-.venv}
what=${2:-user}

if [ "$(uname -s)" != Linux ]; then
    echo "setup: found $(uname -s), expected Linux: DLRover-Py runs on no other system" >&2
    exit 2
fi
python=
for candidate in python3.13 python3.12 python3.11 python3; do
    # pyenv has a shim for each version that it knows of. Those of versions that are not switched on
    # fail, with several lines: they are no candidates, and their words are of no use here.
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -q && apt-get install -qy python3 python3-venv
        python=python3
    else
        echo "setup: no python3.13, python3.12, python3.11 or python3 on the PATH is Python 3.11," \
            "3.12 or 3.13: install one of these and run make setup again" >&2
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
case $what in
build) exit ;;
user) extras=torch,s3,examples ;;
dev) extras=dev,docs,examples ;;
*)
    echo "setup: found $what, expected build, user or dev" >&2
    exit 2
    ;;
esac
echo "setup: installing into $venv (torch is large: this takes a minute or two)"
"$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" \
    -c constraints.txt -e ".[$extras]"
# Once, here: where nothing may be written later each process compiles torch anew, 2 to 3 s of CPU.
# Other libraries are compiled when they are first imported: all of them take more than a minute.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages/torch >/dev/null || true
if [ "$what" = dev ]; then
    packages=("$venv"/lib/python3.*/site-packages)
    cp scripts/rare_gc.py "${packages[0]}/dlrover_rare_gc.py"
    echo "import dlrover_rare_gc" >"${packages[0]}/dlrover_rare_gc.pth"
    cp scripts/late_torch.py "${packages[0]}/dlrover_late_torch.py"
    echo 'import os; "TESTS_LATE_TORCH" in os.environ and __import__("dlrover_late_torch")' \
        >"${packages[0]}/dlrover_late_torch.pth"
fi
echo "setup: done; try: source $venv/bin/activate && dlrover --help"
