#!/usr/bin/env bash
# Builds the fuzzers of tests/fuzz with clang (libFuzzer, ASan, UBSan) and runs each for a while, as
# many at once as there are CPUs. A finding fails the script, which names its input.
#
#   scripts/fuzz.sh [--keep] [SECONDS] [FUZZER...]     60 seconds each of all of them
#
# Starts from tests/fuzz/corpus and from valid inputs that make_seeds.py writes; --keep puts what was
# found on the way into tests/fuzz/corpus, minimized.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

keep=0
if [[ "${1-}" == --keep ]]; then keep=1 && shift; fi
seconds="${1:-60}"
fuzzers=("${@:2}")
if ((${#fuzzers[@]} == 0)); then
  mapfile -t fuzzers < <(cd tests/fuzz && ls -- *_fuzzer.cc | sed 's/\.cc$//')
fi

build=build/fuzz
cmake --preset asan -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DWEFT_FUZZERS=ON >/dev/null
ninja --quiet -C "$build" "${fuzzers[@]}"
python3 tests/fuzz/make_seeds.py tests/data "$build/seeds"
# Inputs that a parser reads from a file are written to memory.
if [[ -d /dev/shm ]]; then export TMPDIR=/dev/shm; fi

run_one() {
  local fuzzer=$1 committed=tests/fuzz/corpus/$1 found=$build/corpus/$1 log=$build/logs/$1.log
  mkdir -p "$committed" "$found" "$build/crashes" "$build/logs"
  if ! "$build/bin/$fuzzer" -max_total_time="$seconds" -max_len=4096 -timeout=60 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$build/crashes/$fuzzer-" \
    "$found" "$committed" "$build/seeds/$fuzzer" >"$log" 2>&1; then
    echo "fuzz: $fuzzer found something:" >&2
    tail -40 "$log" >&2
    return 1
  fi
  echo "fuzz: $fuzzer: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $seconds s"
  if ((keep)); then
    "$build/bin/$fuzzer" -merge=1 -verbosity=0 "$committed" "$found" "$build/seeds/$fuzzer" >>"$log" 2>&1
  fi
}
export -f run_one
export build seconds keep
printf '%s\n' "${fuzzers[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run_one {}'
