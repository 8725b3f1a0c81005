#!/usr/bin/env bash
# What knowing the groups' prefix caches buys a router: sessions of an agent over three groups, placed by prefix-aware
# and by round-robin, in rounds that alternate. Each round has prompts of its own, so that it begins with cold caches.
# Needs a build and models/smollm2-135m-instruct.
#   scripts/bench_routing.sh [--rounds 3] [--sessions 6] [--turns 4] [--prefix-len 256] [--session-len 256]
#                            [--turn-len 32] [--output-len 16] [--policies prefix-aware,round-robin]
# Prints a line for each policy and round, and the medians. Fails when prefix-aware finds less cached than round-robin,
# or takes longer to the first token.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
rounds=3 sessions=6 turns=4 prefix=256 session=256 turn=32 output=16 policies=prefix-aware,round-robin
while (($# > 1)); do
  case $1 in
    --rounds) rounds=$2 ;;
    --sessions) sessions=$2 ;;
    --turns) turns=$2 ;;
    --prefix-len) prefix=$2 ;;
    --session-len) session=$2 ;;
    --turn-len) turn=$2 ;;
    --output-len) output=$2 ;;
    --policies) policies=$2 ;;
    *) break ;;
  esac
  shift 2
done
(($# == 0)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }

readonly model=models/smollm2-135m-instruct name=unix-abstract:weft-routing-$$
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait; rm -rf "$work"' EXIT
groups=
for i in 0 1 2; do
  "$bin/weft-worker" --model "$model" --listen "$name-group$i" --local-ranks 1 --threads-per-rank 1 --block-size 32 \
    --max-model-len 4K --kv-cache-memory-bytes 512MiB --metrics-port=-1 --log-level=warn & pids+=($!)
  groups+=${groups:+,}$name-group$i
done
for policy in ${policies//,/ }; do
  "$bin/weft-router" --model "$model" --groups "$groups" --listen "$name-$policy" --routing-policy "$policy" \
    --skip-tokenizer-init --metrics-port=-1 --log-level=warn & pids+=($!)
done
ready() { "$bin/weft" status --address "$1" --format=json 2>/dev/null | grep -o '"ready": *true' | wc -l; }
for policy in ${policies//,/ }; do
  until (($(ready "$name-$policy") == 3)); do sleep 0.5; done
done

# Two routers that know nothing of each other: one at a time.
for ((round = 1; round <= rounds; ++round)); do
  order=${policies//,/ }
  ((round % 2)) || order=$(tr ' ' '\n' <<<"$order" | tac | tr '\n' ' ')
  for policy in $order; do
    "$bin/weft" bench --address "$name-$policy" --format=json --dataset=agentic --agentic-sessions="$sessions" \
      --agentic-turns="$turns" --agentic-prefix-len="$prefix" --agentic-session-len="$session" \
      --agentic-turn-len="$turn" --agentic-output-len="$output" --seed="$((round * 100 + ${#policy}))" \
      >"$work/$policy.$round.json"
  done
done
.venv/bin/python - "$work" "$policies" "$rounds" <<'PY'
import json, pathlib, statistics, sys
work, policies, rounds = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
KEYS = [("prefix_cache_hit_ratio", "cached", 100, "%"), ("mean_ttft_ms", "mean TTFT", 1, "ms"),
        ("p99_ttft_ms", "p99 TTFT", 1, "ms"), ("request_throughput", "requests", 1, "/s")]
medians = {}
for policy in policies:
    runs = [json.loads((work / f"{policy}.{r + 1}.json").read_text()) for r in range(rounds)]
    assert all(run["failed"] == 0 for run in runs), policy
    for number, run in enumerate(runs, 1):
        print(f"{number:>3}  {policy:<14}" + "".join(f"  {name} {run[key] * by:8.2f} {unit}" for key, name, by, unit in KEYS))
    medians[policy] = {key: statistics.median(run[key] for run in runs) for key, *_ in KEYS}
for policy, of in medians.items():
    print(f"median {policy:<14}" + "".join(f"  {name} {of[key] * by:8.2f} {unit}" for key, name, by, unit in KEYS))
if {"prefix-aware", "round-robin"} <= medians.keys():
    aware, turn = medians["prefix-aware"], medians["round-robin"]
    print(f"mean TTFT {turn['mean_ttft_ms'] / aware['mean_ttft_ms']:.2f} times shorter with prefix-aware")
    sys.exit(not (aware["prefix_cache_hit_ratio"] > turn["prefix_cache_hit_ratio"]
                  and aware["mean_ttft_ms"] < turn["mean_ttft_ms"]))
PY
