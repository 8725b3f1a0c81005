#!/usr/bin/env bash
# What sharding the KV cache by position buys, and costs. Needs a build and a quiet machine.
#   scripts/bench_dcp.sh [--rounds 1] [--workload agentic] [--sessions 8] [--turns 8] [--prefix-len 2048]
#                        [--session-len 1024] [--turn-len 16] [--output-len 64] [--budget BLOCKS]
#   scripts/bench_dcp.sh [--rounds 1] --workload saturated|equal
# agentic: sessions of an agent on a model of SmolLM2's size with one KV head, two ranks with equal KV bytes each,
#   --decode-context-parallel-size 1 against 2. What the sessions need at last is just under two budgets, so that N=1
#   computes again and again what N=2 finds. --budget is what one rank holds without sharding, in blocks of 128 tokens;
#   default: half of what the sessions need. Prints requests per second, the most requests that ran at a time and the
#   hit ratio of each, the ratios, and what one short request alone loses. Fails when requests per second are under 2
#   times or the peak under 1.9 times.
# saturated: the same model and ranks, contexts of about 2K and 8K tokens, as many sequences as the KV cache holds: two
#   without sharding, four with it. Fails when N=2 gives under 1.6 times the output tokens per second of N=1.
# equal: SmolLM2, 8 sequences, contexts of about 512, T=2 x N=2 with a thread a rank against one rank with two threads.
#   Fails under 0.95 times.
# Of both, output tokens per second while all decode: both serve at once, and take turns with prompts that are in their
# prefix caches by then. What the same requests take with their prompts is printed beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh
workload=agentic rounds=1 sessions=8 turns=8 prefix=2048 session=1024 turn=16 output=64 budget=
while (($# > 1)); do
  case $1 in
    --rounds) rounds=$2 ;;
    --workload) workload=$2 ;;
    --sessions) sessions=$2 ;;
    --turns) turns=$2 ;;
    --prefix-len) prefix=$2 ;;
    --session-len) session=$2 ;;
    --turn-len) turn=$2 ;;
    --output-len) output=$2 ;;
    --budget) budget=$2 ;;
    *) break ;;
  esac
  shift 2
done
(($# == 0)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }

readonly model=.deps/models/smollm2-size-one-kv-head
readonly python=.venv/bin/python
readonly kv_bytes_per_token=$((2 * 64 * 2 * 30)) # K and V of one head of 64 in float16, 30 layers
[[ -e $model/config.json ]] || "$python" scripts/make_model.py "$model" --num-key-value-heads 1

work=$(mktemp -d)
servers=()
stop() {
  for server in "${servers[@]}"; do { kill "$server" && wait "$server" || true; } 2>/dev/null; done
  servers=()
}
trap 'stop; rm -rf "$work"' EXIT
# start NAME ARGUMENTS...: `addresses[NAME]` is where it listens.
declare -A addresses
start() {
  serve "$work/log" "${@:2}"
  servers+=("$server")
  addresses[$1]=$address
}

readonly block=128
# sharded NAME N KV_BLOCKS: two ranks of the model with one KV head.
sharded() {
  start "$1" "$model" --skip-tokenizer-init -tp 2 -dcp "$2" --block-size="$block" \
    --kv-cache-memory-bytes=$(($3 * block * kv_bytes_per_token)) --kv-cache-dtype=float16
}
# run NAME WHICH ROUND SEQUENCES FIRST_CONTEXT SEED: all at once, 256 tokens each. One token more than whole blocks, so
# that a prompt that was there before needs no more than that one.
run() {
  "$bin/weft" bench --address "${addresses[$1]}" --format=json --num-warmups=0 --num-prompts="$4" \
    --random-input-len=$(($5 + 1)) --random-output-len=256 --seed="$6" >"$work/$1.$2.$3.json"
}
# compare FLOOR ONE TWO: what was run, as medians and ratios.
compare() {
  "$python" - "$work" "$@" <<'EOF'
import json, pathlib, statistics, sys

work, floor, names = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]

def rounds(name, which):
    return [json.loads(p.read_text()) for p in sorted(work.glob(f"{name}.{which}.*.json"))]

def decoding(result):
    cached, preempted = result["prefix_cache_hit_ratio"], result["preemptions"]
    if cached < 0.99 or preempted > 0 or result["p99_ttft_ms"] > result["median_e2el_ms"] / 2:
        sys.exit(f"bench_dcp: they did not decode together: {cached:.2f} of the prompts cached, {preempted} "
                 f"preempted, first tokens within {result['p99_ttft_ms']:.0f} ms")
    return 1000 * result["num_prompts"] / result["median_tpot_ms"]

def text(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"

def line(title, speeds, note):
    ratios = [b / a for a, b in zip(*speeds)]
    print(f"{title:14} " + ", ".join(f"{name} {text(v, 1)}" for name, v in zip(names, speeds)) +
          f" output tok/s; ratio {text(ratios, 2)}{note}")
    return statistics.median(ratios)

line("with prompts", [[r["output_throughput"] for r in rounds(name, "prompts")] for name in names], "")
ratio = line("all decoding", [[decoding(r) for r in rounds(name, "decode")] for name in names], f", at least {floor}")
sys.exit(0 if ratio >= floor else 1)
EOF
}

case $workload in
  agentic) ;;
  saturated)
    status=0
    for context in 2048 8192; do
      names=("context-$context-N1" "context-$context-N2")
      for n in 1 2; do sharded "${names[n - 1]}" "$n" $((2 * (context / block + 1))); done
      for n in 1 2; do run "${names[n - 1]}" prompts 1 $((2 * n)) $((context - 256)) 0; done
      for ((round = 1; round <= rounds; ++round)); do
        for n in 1 2; do run "${names[n - 1]}" decode "$round" $((2 * n)) $((context - 256)) 0; done
      done
      stop
      compare 1.6 "${names[@]}" || status=1
    done
    exit "$status"
    ;;
  equal)
    start T1 models/smollm2-135m-instruct --threads-per-rank=2
    start T2-N2 models/smollm2-135m-instruct -tp 2 -dcp 2 --threads-per-rank=1
    for ((round = 1; round <= rounds; ++round)); do
      for which in prompts decode; do
        for name in T1 T2-N2; do run "$name" "$which" "$round" 8 384 "$round"; done
      done
    done
    stop
    compare 0.95 T1 T2-N2
    exit
    ;;
  *) echo "bench_dcp: --workload takes agentic, saturated or equal" >&2 && exit 2 ;;
esac

blocks() { echo $((($1 + block - 1) / block)); }
need=$(($(blocks "$prefix") + sessions * $(blocks $((session + turns * (turn + output)))) + 1))
budget=${budget:-$(((need + 1) / 2))}
echo "the sessions need $need blocks of $block tokens; a rank holds $budget without sharding, two $((2 * budget)) with it"

# measure N ROUND
measure() {
  sharded "N$1" "$1" "$budget"
  "$bin/weft" bench --address "$address" --format=json --num-prompts=10 --random-input-len=32 \
    --random-output-len=32 --max-concurrency=1 --num-warmups=3 >"$work/short.$1.$2.json"
  "$bin/weft" bench --address "$address" --format=json --dataset=agentic --agentic-sessions="$sessions" \
    --agentic-turns="$turns" --agentic-prefix-len="$prefix" --agentic-session-len="$session" \
    --agentic-turn-len="$turn" --agentic-output-len="$output" >"$work/agentic.$1.$2.json"
  stop
}

for ((round = 1; round <= rounds; ++round)); do
  for n in 1 2; do measure "$n" "$round"; done
done
"$python" - "$work" "$rounds" <<'EOF'
import json, pathlib, statistics, sys

work, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def median(kind, n, key):
    return statistics.median(json.loads((work / f"{kind}.{n}.{r}.json").read_text())[key] for r in range(1, rounds + 1))

rows = [("requests/s", "agentic", "request_throughput"), ("peak running", "agentic", "peak_running"),
        ("hit ratio", "agentic", "prefix_cache_hit_ratio"), ("uncached prompt tok/s", "agentic", "uncached_input_throughput"),
        ("evicted blocks", "agentic", "evictions"), ("preemptions", "agentic", "preemptions"),
        ("median TTFT (ms)", "agentic", "median_ttft_ms"), ("one short request (ms)", "short", "median_e2el_ms")]
print(f"{'':24} {'N=1':>10} {'N=2':>10} {'N=2 / N=1':>10}")
ratios = {}
for title, kind, key in rows:
    one, two = median(kind, 1, key), median(kind, 2, key)
    ratios[key] = two / one if one else float("nan")
    print(f"{title:24} {one:10.2f} {two:10.2f} {ratios[key]:10.2f}")
print(f"one short request takes {100 * (ratios['median_e2el_ms'] - 1):+.0f} % with N=2")
sys.exit(0 if ratios["request_throughput"] >= 2 and ratios["peak_running"] >= 1.9 else 1)
EOF
