#!/usr/bin/env bash
# What the hand-off of prompts costs and buys, on this host:
#   - how fast KV moves between groups, beside a memcpy and a bare UCX stream (tests/bench/kv_transfer_bench.cc);
#   - latencies with one group and with a prefill group beside it, on the same cores (tests/bench/pd_bench.py).
# Needs a build and models/smollm2-135m-instruct. Figures are good only on a machine that does nothing else.
#
#   scripts/bench_pd.sh [--transfer-only] [--rounds 3] [--prompt 1024] [--tokens 120]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" UCX_NET_DEVICES=lo PYTHONDONTWRITEBYTECODE=1
transfer_only=0
if [ "${1-}" = --transfer-only ]; then transfer_only=1 && shift; fi
echo "load of this machine: $(cut -d' ' -f1-3 /proc/loadavg), $(nproc) CPUs"

"$WEFT_BIN_DIR/kv_transfer_bench"
# What UCX itself moves in one stream over TCP, in pieces as long as our messages.
ucx_stream() {
  local port=$((20000 + RANDOM % 20000)) server
  UCX_TLS=tcp,self ucx_perftest -p "$port" >/dev/null 2>&1 &
  server=$!
  sleep 1
  UCX_TLS=tcp,self ucx_perftest 127.0.0.1 -p "$port" -t stream_bw -s 262144 -n 1000 -w 50 -f 2>/dev/null |
    tail -1 | awk '{printf "a bare UCX stream over TCP: %.2f GB/s\n", $6 * 1.048576 / 1000}'
  wait "$server" || true
}
if command -v ucx_perftest >/dev/null; then
  for _ in 1 2 3; do ucx_stream; done
else
  echo "ucx_perftest (Debian's ucx-utils) is missing: no bare UCX stream to compare with"
fi
if [ "$transfer_only" = 1 ]; then exit; fi
exec .venv/bin/python tests/bench/pd_bench.py "$@"
