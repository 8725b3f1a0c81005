#!/usr/bin/env bash
# What a slow reader costs 99 other clients: the 99th percentile of their inter-token latency beside one more
# client that reads and beside one that does not, in alternating rounds. Needs a build and a quiet machine.
#   scripts/bench_slow_reader.sh [--rounds 5] [--output-len 64]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh

log=$(mktemp)
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -f "$log"' EXIT
serve "$log" models/smollm2-135m-instruct -tp 2 -dcp 2 --max-num-seqs=128 --max-num-batched-tokens=512 --max-model-len=2K
"$bin/slow_reader_bench" --address "$address" --clients 100 --long-len 2000 "$@"
