#!/usr/bin/env bash
# Builds the fuzzers of tests/fuzz with clang (libFuzzer, ASan, UBSan) and runs each for a while.
# A crash ends it with the input's path; the corpus stays in build/fuzz/corpus.
#   scripts/fuzz.sh [SECONDS] [FUZZER...]     60 seconds each of all of them
# Needs: clang, with its libclang-rt-*-dev.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds="${1:-60}"
fuzzers=("${@:2}")
if ((${#fuzzers[@]} == 0)); then
  fuzzers=(safetensors_fuzzer model_config_fuzzer step_plan_fuzzer frame_fuzzer collective_fuzzer
    tokenizer_fuzzer chat_template_fuzzer generate_request_fuzzer)
fi

build=build/fuzz
cmake --preset asan -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DWEFT_FUZZERS=ON >/dev/null
ninja -C "$build" "${fuzzers[@]}"
python3 tests/fuzz/make_seeds.py tests/data "$build/seeds"
# Inputs that a parser reads from a file are written to memory.
if [[ -d /dev/shm ]]; then export TMPDIR=/dev/shm; fi
for fuzzer in "${fuzzers[@]}"; do
  mkdir -p "$build/corpus/$fuzzer" "$build/crashes"
  echo "fuzz: $fuzzer for $seconds s"
  "$build/bin/$fuzzer" -max_total_time="$seconds" -max_len=4096 -timeout=10 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$build/crashes/$fuzzer-" \
    "$build/corpus/$fuzzer" "$build/seeds/$fuzzer"
done
