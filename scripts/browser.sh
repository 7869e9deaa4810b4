#!/usr/bin/env bash
# See to it that this machine has a browser for the tests of the page at /dashboard.
#
# One that is on the PATH will do. Otherwise Debian's package is installed, which needs
# root. The names are those of browsers.txt, which browsers.py reads too.
set -euo pipefail

mapfile -t BROWSERS <"${BASH_SOURCE[0]%/*}/browsers.txt"
readonly BROWSERS

has_browser() {
    local name
    for name in "${BROWSERS[@]}"; do
        if command -v "$name" >/dev/null; then
            return
        fi
    done
    return 1
}

fail() {
    printf 'browser: %s\n' "$@" >&2
    exit 1
}

main() {
    local remedy="on Debian: apt-get install chromium; elsewhere install Chromium or Google Chrome"
    if has_browser; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "none of ${BROWSERS[*]} is on the PATH, and the page's tests need one" "$remedy"
    fi
    printf 'browser: installing chromium\n'
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium ||
        fail "apt-get could not install chromium; its reason is above" "$remedy"
    has_browser || fail "apt-get installed chromium, and it is not on the PATH" "$remedy"
}

main
