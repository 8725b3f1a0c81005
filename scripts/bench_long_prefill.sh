#!/usr/bin/env bash
# What running requests feel while a long prompt is computed, and what it feels of them: the 99th percentile of
# their inter-token latency against the time of a full step, and the prompt's rate against its rate alone. Default
# budgets, a model of random weights. Needs a build and a quiet machine.
#   scripts/bench_long_prefill.sh [--prompt-len 16384] [--running 8] [--num-hidden-layers 30]
# Fails when the latency is over 2 full steps, or the rate under half of that alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WEFT_BIN_DIR=${WEFT_BIN_DIR:-$PWD/build/bin} PYTHONPATH=tests/e2e exec .venv/bin/python scripts/bench_long_prefill.py "$@"
