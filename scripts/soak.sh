#!/usr/bin/env bash
# Whether memory, descriptors and threads of a router and its ranks stay flat over 10,000 requests, one in
# ten of them cancelled: a row per chunk and a verdict (exit code 1: something grew). Needs a build.
#   scripts/soak.sh [--requests 10000] [--chunks 20]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" .venv/bin/python tests/e2e/soak.py "$@"
