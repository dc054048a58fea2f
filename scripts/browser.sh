#!/usr/bin/env bash
# Installs Chromium for tests/browser where it can: as root, with apt. Elsewhere those tests are
# skipped, unless DLROVER_REQUIRE_BROWSER is set.
set -euo pipefail
if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then
    exit
fi
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "browser: installing chromium"
    apt-get update -qq
    apt-get install -qqy --no-install-recommends chromium >/dev/null
else
    echo "browser: there is no chromium; the tests with a browser are skipped" >&2
fi
