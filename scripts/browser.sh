#!/bin/sh
# Makes sure that there is a chromium for the tests of pages (tests/browser). PACELINE_BROWSER may name another one.
set -eu

say() { echo "browser: $*"; }

for name in "${PACELINE_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" > /dev/null 2>&1; then
        say "$(command -v "$name")"
        exit 0
    fi
done

if ! command -v apt-get > /dev/null 2>&1; then
    say "no chromium, and no apt-get to install it with: install it, or set PACELINE_BROWSER" >&2
    exit 1
fi
AS_ROOT=
if [ "$(id -u)" != 0 ]; then
    command -v sudo > /dev/null 2>&1 || { say "no chromium: install it as root with apt-get install chromium" >&2; exit 1; }
    AS_ROOT="sudo -n"
fi
say "installing chromium"
install() { $AS_ROOT env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > /dev/null; }
install || { $AS_ROOT apt-get update -qq && install; }
say "$(command -v chromium)"
