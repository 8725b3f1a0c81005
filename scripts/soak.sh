#!/usr/bin/env bash
# Long runs against real processes. Each prints what happened and a verdict (exit code 1: something is wrong);
# needs a build.
#
#   scripts/soak.sh [flat] [--requests 10000] [--chunks 20]
#       whether memory, descriptors and threads of a router and its ranks stay flat, one request in ten cancelled
#   scripts/soak.sh chaos [--seconds 300] [--streams 200] [--seed N]
#       whether every stream ends with the reference's tokens while processes are killed, stopped and restarted,
#       and no call fails while all of them are restarted in turn
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=flat
case "${1-}" in flat | chaos) what=$1 && shift ;; esac
exec env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" .venv/bin/python "tests/e2e/$what.py" "$@"
