#!/usr/bin/env bash
# Takes prometheus and promtool from Debian's package prometheus, for the tests of metrics and
# alerts, and puts them into the folder of built programs. Nothing is installed. Where apt has no
# such package those tests are skipped, unless DLROVER_REQUIRE_PROMETHEUS is set.
set -euo pipefail
cache=${DLROVER_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dlrover-py/cluster}/bin/debian
programs=(prometheus promtool)
missing=()
for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || [ -x "$cache/$program" ] || missing+=("$program")
done
if [ ${#missing[@]} = 0 ]; then
    exit
fi
if command -v apt-get >/dev/null && apt-cache show prometheus >/dev/null 2>&1; then
    echo "prometheus: taking ${missing[*]} from Debian's package"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    mkdir -p "$cache"
    if (cd "$folder" && apt-get -qq download prometheus) 2>/dev/null; then
        dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb |
            tar -xC "$folder" "${missing[@]/#/./usr/bin/}"
        for program in "${missing[@]}"; do
            install -m 755 "$folder/usr/bin/$program" "$cache/$program"
        done
        exit
    fi
fi
echo "prometheus: there is no ${missing[*]}; the tests of metrics and alerts are skipped" >&2
