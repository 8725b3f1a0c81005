#!/usr/bin/env bash
# What a router costs for each token message, beside a bare gRPC relay, before a group that costs nothing. Needs a
# build; several numbers a run, in rounds that alternate.
#   scripts/bench_router.sh [--streams 1000] [--rounds 5] [--seconds 5] [--json FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
name=unix-abstract:weft-bench-$$

"$bin/router_bench" leader --listen "$name-leader" & leader=$!
"$bin/router_bench" relay --listen "$name-relay" --leader "$name-leader" & relay=$!
"$bin/weft-router" --groups "$name-leader" --listen "$name-router" --skip-tokenizer-init --metrics-port=-1 \
  --log-level=warn & router=$!
trap 'kill "$leader" "$relay" "$router" 2>/dev/null; wait' EXIT
for role in leader relay router; do
  until grep -q "@${name#*:}-$role\$" /proc/net/unix; do sleep 0.1; done
done
"$bin/router_bench" load --router "$name-router" --router-pid "$router" --relay "$name-relay" --relay-pid "$relay" "$@"
