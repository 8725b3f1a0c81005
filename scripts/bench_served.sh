#!/usr/bin/env bash
# `weft serve` beside llama-server: SmolLM2 in bfloat16 with two threads, each program alone on the machine, in
# alternating rounds. Served: prompts of 512 tokens and answers of 128, all requests at once; output tokens per second.
# Prompts: of 512 and 2048 tokens, one at a time, for one token each; input tokens per second. Prints figures and
# ratios; fails when Weft is slower anywhere. Needs a build and a quiet machine; scripts/bench_peer.sh builds the peer.
#   scripts/bench_served.sh [--rounds 3] [--clients "8 32 64"] [--prompts "512 2048"] [--vllm PROGRAM] [--output FILE]
# --vllm: beside vLLM for CPUs, too, where it is set up; its environment (VLLM_CPU_*, LD_PRELOAD) in WEFT_VLLM_ENV, as
# words NAME=VALUE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh
rounds=3 clients="8 32 64" prompts="512 2048" vllm='' output=tests/bench/results/served.json
while (($# > 1)); do
  case $1 in
    --rounds) rounds=$2 ;;
    --clients) clients=$2 ;;
    --prompts) prompts=$2 ;;
    --vllm) vllm=$2 ;;
    --output) output=$2 ;;
    *) break ;;
  esac
  shift 2
done
(($# == 0)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# What is measured: NAME CLIENTS REQUESTS INPUT OUTPUT, of tokens.
cells=()
for n in $clients; do cells+=("clients-$n $n $n 512 128"); done
for n in $prompts; do cells+=("prompts-$n 1 8 $n 1"); done
readonly peer=.deps/llama.cpp/build/bin/llama-server gguf=.deps/models/smollm2-135m-bf16.gguf
[[ -x $peer && -e $gguf ]] || { echo "bench_served: run scripts/bench_peer.sh first" >&2; exit 1; }
python=.venv/bin/python
work=$(mktemp -d)
server=
stop() { [[ -z $server ]] || { kill "$server" && wait "$server" || true; } 2>/dev/null; server=; }
trap 'stop; rm -rf "$work"' EXIT

# serve_peer COMMAND...: of a program that takes --port and says by /health when it is ready; `address` is where.
serve_peer() {
  local port
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$@" --host 127.0.0.1 --port "$port" >"$work/log" 2>&1 &
  server=$!
  address=http://127.0.0.1:$port
  until [[ $(curl -s -o "$work/health" -w '%{http_code}' "$address/health") == 200 ]]; do
    kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.2
  done
}
# ask PROGRAM ARGUMENTS...: what bench_served.py measures at `address`, of a cell that has been read.
ask() {
  "$python" scripts/bench_served.py --url "$address" --clients "$n" --requests "$requests" --input-len "$input" \
    --output-len "$answer" "${@:2}" >"$work/$1.$name.$round.json"
}

for ((round = 1; round <= rounds; ++round)); do
  for cell in "${cells[@]}"; do
    read -r name n requests input answer <<<"$cell"
    serve "$work/log" models/smollm2-135m-instruct --threads-per-rank=2
    "$bin/weft" bench --address "$address" --format=json --num-prompts="$requests" --max-concurrency="$n" \
      --num-warmups=1 --random-input-len="$input" --random-output-len="$answer" >"$work/weft.$name.$round.json" \
      2>"$work/bench.log"
    stop
    serve_peer "$peer" -m "$gguf" -t 2 -tb 2 -np "$n" -c $((n * (input + answer + 8))) --no-kv-unified
    ask llama-server
    stop
  done
  [[ -n $vllm ]] || continue
  # Starts in minutes: once a round.
  read -ra vllm_env <<<"${WEFT_VLLM_ENV:-}"
  serve_peer env "${vllm_env[@]}" "$vllm" serve models/smollm2-135m-instruct --served-model-name smollm2 \
    --dtype bfloat16 --max-model-len 8192 --max-num-seqs 64 --no-enable-prefix-caching
  for cell in "${cells[@]}"; do
    read -r name n requests input answer <<<"$cell"
    ask vllm --model smollm2
  done
  stop
done
"$python" - "$work" "$output" "${cells[@]%% *}" <<'EOF'
import json, pathlib, statistics, sys

work, output, cells = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]

def speeds(program, cell):
    key = "output_throughput" if cell.startswith("clients") else "uncached_input_throughput"
    return [json.loads(p.read_text())[key] for p in sorted(work.glob(f"{program}.{cell}.*.json"))]

def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"

peers = [name for name in ("llama-server", "vllm") if speeds(name, cells[0])]
result, ahead = {}, True
print(f"{'tok/s':>14}{'weft':>24}" + "".join(f"{name:>24}{'ratio':>24}" for name in peers))
for cell in cells:
    own = speeds("weft", cell)
    result[cell] = {"weft": own}
    line = f"{cell:>14}{spread(own, 0):>24}"
    for name in peers:
        result[cell][name] = speeds(name, cell)
        ratios = [a / b for a, b in zip(own, result[cell][name])]
        ahead &= statistics.median(ratios) >= 1
        line += f"{spread(result[cell][name], 0):>24}{spread(ratios, 2):>24}"
    print(line)
output.write_text(json.dumps(result, indent=1) + "\n")
print(f"written to {output}")
sys.exit(0 if ahead else 1)
EOF
