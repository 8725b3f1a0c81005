#!/usr/bin/env bash
# Which --dcp-comm-backend is faster here: the time per output token of both, in alternating rounds, for layouts
# and numbers of clients. Needs a build and a quiet machine.
#   scripts/bench_exchange.sh [--rounds 5] [--clients "1 8 32"] [--layouts "2/2 4/4"] [--model DIR]
# A layout is ranks/ranks that share a sequence.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh
rounds=5 clients="1 8 32" layouts="2/2 4/4" model=models/smollm2-135m-instruct
while (($# > 1)); do
  case $1 in
    --rounds) rounds=$2 ;;
    --clients) clients=$2 ;;
    --layouts) layouts=$2 ;;
    --model) model=$2 ;;
    *) break ;;
  esac
  shift 2
done
(($# == 0)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }

work=$(mktemp -d)
servers=()
stop() {
  for server in "${servers[@]}"; do kill "$server" 2>/dev/null && wait "$server" || true; done 2>/dev/null
  servers=()
}
trap 'stop; rm -rf "$work"' EXIT

declare -A addresses # by exchange

for layout in $layouts; do
  # An idle group takes no time from the one that is measured.
  for exchange in ag_rs a2a; do
    serve "$work/$exchange.log" "$model" -tp "${layout%/*}" -dcp "${layout#*/}" --dcp-comm-backend="$exchange" \
      --max-model-len=2K
    servers+=("$server")
    addresses[$exchange]=$address
  done
  for ((round = 1; round <= rounds; ++round)); do
    for c in $clients; do
      for exchange in ag_rs a2a; do
        "$bin/weft" bench --address "${addresses[$exchange]}" --format=json --random-input-len=128 \
          --random-output-len=64 --num-prompts=$((2 * c)) --max-concurrency="$c" \
          >"$work/${layout/\//-}.$c.$exchange.$round.json"
      done
    done
  done
  stop
done
.venv/bin/python - "$work" "$rounds" "$clients" "$layouts" <<'EOF'
import json, pathlib, statistics, sys

work, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print("time per output token, ms: median (least to most) of the rounds' medians")
print(f"{'T/N':>5} {'clients':>8} {'ag_rs':>26} {'a2a':>26} {'a2a / ag_rs':>12}")
for layout in sys.argv[4].split():
    for clients in sys.argv[3].split():
        cells = []
        for exchange in ("ag_rs", "a2a"):
            values = [json.loads((work / f"{layout.replace('/', '-')}.{clients}.{exchange}.{r}.json").read_text())["median_tpot_ms"]
                      for r in range(1, rounds + 1)]
            cells.append((statistics.median(values), min(values), max(values)))
        text = [f"{m:8.2f} ({low:.2f} to {high:.2f})" for m, low, high in cells]
        print(f"{layout:>5} {clients:>8} {text[0]:>26} {text[1]:>26} {cells[1][0] / cells[0][0]:12.2f}")
EOF
