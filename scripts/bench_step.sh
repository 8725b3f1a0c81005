#!/usr/bin/env bash
# What a step wastes, what a group costs that does nothing, and what a start takes, each beside its limit. Needs a build
# and a quiet machine. Fails when one is over its limit.
#   scripts/bench_step.sh [--model DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh
model=models/smollm2-135m-instruct
while (($# > 1)); do
  case $1 in
    --model) model=$2 ;;
    *) break ;;
  esac
  shift 2
done
(($# == 0)) || { sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; }

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || { kill "$server" && wait "$server" || true; } 2>/dev/null; rm -rf "$work"' EXIT
failed=0
# at_most WHAT VALUE LIMIT UNIT
at_most() {
  local verdict=ok
  [[ $2 =~ ^[0-9.]+$ ]] || { echo "bench_step: no figure of $1: '$2'" >&2; exit 1; }
  awk -v value="$2" -v limit="$3" 'BEGIN { exit !(value <= limit) }' || { verdict="OVER THE LIMIT" failed=1; }
  printf '%-72s %9s %-3s at most %-5s %s\n' "$1" "$2" "$4" "$3" "$verdict"
}
now() { date +%s.%N; }

"$bin/engine_bench" --model "$model" --dtype bfloat16 --batch 64 --prompt 128 --tokens 128 --max-model-len 320 \
  --tries 1 >"$work/step.json"
at_most "between steps of 64 rows, of their time" \
  "$(awk -F'"between_steps":' 'NF == 2 { split($2, a, ","); printf "%.3f", 100 * a[1] }' "$work/step.json")" 2 %

"$bin/group_bench" 4 >"$work/collectives"
for bytes in 4096 16384; do
  read -r _ all_reduce _ all_gather _ reduce_scatter _ all_to_all _ < <(grep "^ *$bytes " "$work/collectives")
  for op in all_reduce all_gather reduce_scatter all_to_all; do
    at_most "${op//_/-} of $bytes bytes, 4 ranks on $(nproc) CPUs, p50" "${!op}" 60 us
  done
done

# Of the serve process: itself, its router, its supervisor and the ranks.
tree() { pgrep -P "$(echo "$1" $(pgrep -P "$1") | tr ' ' ,)"; echo "$1"; }
# Of processes, in clock ticks.
ticks() {
  local pid sum=0
  for pid in "$@"; do sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat"))); done
  echo "$sum"
}
for ranks in 1 2; do
  # A pool small enough for the requests to touch all of it.
  serve "$work/log" "$model" --dtype=bfloat16 -tp "$ranks" -dcp "$ranks" --kv-cache-memory-bytes=64MiB
  "$bin/weft" bench --address "$address" --format=json --num-prompts=24 --random-input-len=512 \
    --random-output-len=2 >/dev/null
  sleep 2
  mapfile -t pids < <(tree "$server")
  before=$(ticks "${pids[@]}")
  sleep 20
  at_most "an idle group of $ranks and its router, of a CPU" \
    "$(awk -v t="$(($(ticks "${pids[@]}") - before))" -v hz="$(getconf CLK_TCK)" 'BEGIN { printf "%.2f", 100 * t / hz / 20 }')" 2 %
  # The rank with the most.
  resident=$(for pid in "${pids[@]}"; do awk '/VmRSS/ { print $2 * 1024 / 1e6 }' "/proc/$pid/status"; done | sort -n | tail -n 1)
  at_most "resident memory of a rank of $ranks beside its weights and KV" \
    "$(sed -n 's/.*memory: \([0-9.]*\) MB weights, \([0-9.]*\) MB KV.*/\1 \2/p' "$work/log" | sort -n | tail -n 1 |
      awk -v rss="$resident" '{ printf "%.0f", rss - $1 - $2 }')" 100 MB
  kill "$server" && wait "$server" 2>/dev/null || true
  server=
done

"$bin/weft" generate --model "$model" --dtype=bfloat16 --prompt Hello --max-tokens 1 >/dev/null 2>&1
start=$(now)
"$bin/weft" generate --model "$model" --dtype=bfloat16 --prompt Hello --max-tokens 1 >/dev/null 2>&1
at_most "second start, its first token and its end" \
  "$(awk -v a="$start" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }')" 1 s
exit "$failed"
