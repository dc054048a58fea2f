#!/usr/bin/env bash
# Takes promtool from Debian's package prometheus, for tests/local/test_alerts.py, and puts it into
# the folder of built programs. Nothing is installed. Where apt has no such package those tests are
# skipped, unless DLROVER_REQUIRE_PROMTOOL is set.
set -euo pipefail
cache=${DLROVER_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dlrover-py/cluster}/bin/debian
if command -v promtool >/dev/null || [ -x "$cache/promtool" ]; then
    exit
fi
if command -v apt-get >/dev/null && apt-cache show prometheus >/dev/null 2>&1; then
    echo "promtool: taking it from Debian's package"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    mkdir -p "$cache"
    if (cd "$folder" && apt-get -qq download prometheus) 2>/dev/null; then
        dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -xC "$folder" ./usr/bin/promtool
        install -m 755 "$folder/usr/bin/promtool" "$cache/promtool"
        exit
    fi
fi
echo "promtool: there is none; the tests of alerts are skipped" >&2
