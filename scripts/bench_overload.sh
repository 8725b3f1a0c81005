#!/usr/bin/env bash
# What a burst of four times capacity costs those that are admitted: the 99th percentile of the time per output token
# beside as many requests as run at once, in rounds that alternate. Needs a build and models/smollm2-135m-instruct.
#   scripts/bench_overload.sh [ROUNDS]
# Fails when the burst's median is more than 1.3 times the other, or when nobody is refused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${WEFT_BIN_DIR:-$PWD/build/bin}
. scripts/serve.sh
rounds=${1:-5}
readonly running=8 waiting=4 queued=4
readonly capacity=$((running + waiting + queued))

work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -rf "$work"' EXIT
serve "$work/log" models/smollm2-135m-instruct --max-model-len=1K --max-num-seqs=$running --max-num-waiting=$waiting \
  --max-queued-requests=$queued

# Prompts of its own for each burst: nothing of them is cached.
run() {
  "$bin/weft" bench --address "$address" --random-input-len=32 --random-output-len=64 --num-prompts="$1" --seed="$2" \
    --format=json 2>>"$work/failures" >>"$work/$3" || true
}
for ((round = 1; round <= rounds; ++round)); do
  run $running "$round" calm
  run $((4 * capacity)) "$((round + 1000))" burst
done
if grep -v RESOURCE_EXHAUSTED "$work/failures" | grep -v "requests wait already" >&2; then exit 1; fi
python3 - "$work" $running $capacity <<'PY'
import json, statistics, sys

work, running, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
calm, burst = ([json.loads(line) for line in open(f"{work}/{name}")] for name in ("calm", "burst"))
for quiet, busy in zip(calm, burst):
    print(f"{running} requests: {quiet['p99_tpot_ms']:6.2f} ms p99 a token; {busy['num_prompts']} at once, {capacity} of them fit: "
          f"{busy['p99_tpot_ms']:6.2f} ms, {busy['completed']} served, {busy['failed']} refused")
ratio = statistics.median(b["p99_tpot_ms"] for b in burst) / statistics.median(c["p99_tpot_ms"] for c in calm)
print(f"medians of {len(calm)} rounds: {ratio:.2f} times (allowed: 1.3)")
sys.exit(ratio > 1.3 or any(b["failed"] == 0 or b["completed"] < capacity for b in burst) or any(c["failed"] for c in calm))
PY
