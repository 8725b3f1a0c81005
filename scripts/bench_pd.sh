#!/usr/bin/env bash
# Latencies with one group and with a prefill group beside it, on the same cores: tests/bench/pd_bench.py.
# Needs a build and models/smollm2-135m-instruct.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" PYTHONDONTWRITEBYTECODE=1 .venv/bin/python tests/bench/pd_bench.py "$@"
