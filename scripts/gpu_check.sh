#!/usr/bin/env bash
# Checks and measures the CUDA backend on this machine's first GPU, in under 420 s:
#
#   scripts/gpu_check.sh [-o FILE]   JSON lines on standard output and in FILE, each as it is known
#   scripts/gpu_check.sh --dry-run   the same under emulation: shows that the script goes, no figures
#
# Builds with `cmake --preset cuda`, or takes the programs in WEFT_BIN_DIR. Exits 0 if all is right and
# fast enough, 1 if something is not, 2 without a GPU or a build.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

dry_run=() out=/dev/null preset=cuda targets=(cuda_bench cuda_kernels_test)
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=(--dry-run) preset=release targets=(cuda_bench) ;;
    -o) out=${2:?-o wants a file}; shift ;;
    *) echo "scripts/gpu_check.sh: unknown argument '$1'; there are --dry-run and -o FILE" >&2; exit 2 ;;
  esac
  shift
done

if [ ${#dry_run[@]} = 0 ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "scripts/gpu_check.sh: no GPU here (nvidia-smi -L finds none); --dry-run goes without" >&2
  exit 2
fi
bin=${WEFT_BIN_DIR:-}
if [ -z "$bin" ]; then
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  cmake --preset "$preset" >/dev/null && cmake --build "build/$preset" --target "${targets[@]}" >/dev/null || exit 2
  bin=build/$preset/bin
fi

: >"$out" || exit 2
deadline=$((SECONDS + 420)) failed=0 ceilings=()
# group SECONDS COMMAND...: what it prints, and a line of how it went. A group that takes too long is ended.
group() {
  local name=$1 seconds=$2 start=$SECONDS code=0 left=$((deadline - SECONDS))
  shift 2
  if [ "$left" -lt 5 ]; then
    code=124
  else
    timeout "$((seconds < left ? seconds : left))" "$@" | tee -a "$out"
    code=${PIPESTATUS[0]}
  fi
  printf '{"group":"%s","seconds":%d,"exit":%d}\n' "$name" "$((SECONDS - start))" "$code" | tee -a "$out"
  [ "$code" = 0 ] || failed=1
}
bench() { group "$1" "$2" "$bin/cuda_bench" "${dry_run[@]}" "${ceilings[@]}" "$1"; }

[ ${#dry_run[@]} = 1 ] || nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,memory.total \
  --format=csv,noheader | head -1 | sed 's/.*/{"group":"gpu","name":"&"}/' | tee -a "$out"

peaks=$(mktemp)
trap 'rm -f "$peaks"' EXIT
group peaks 40 bash -c '"$@" | tee "$0"; exit "${PIPESTATUS[0]}"' "$peaks" "$bin/cuda_bench" "${dry_run[@]}" peaks
read -r copy flops < <(sed -n 's/.*"copy_bytes_per_s":\([0-9.e+]*\),"bf16_flops":\([0-9.e+]*\).*/\1 \2/p' "$peaks")
ceilings=(--copy-bytes-per-s "${copy:-0}" --bf16-flops "${flops:-0}")
# Every kernel against the CPU's; under emulation ctest does it.
if [ ${#dry_run[@]} = 0 ]; then
  kernels() { "$bin/cuda_kernels_test" --gtest_brief=1 --gtest_filter=-*CostTest* >&2; }
  export -f kernels; export bin
  group kernels 60 bash -c kernels
fi
bench gqa 70
bench mla 70
bench merge 20
bench steps 160
# A peer that is not there, or takes too long to compile itself, is no fault of ours.
own_failed=$failed
group peers 45 python3 scripts/gpu_peers.py "${dry_run[@]}"
failed=$own_failed
exit "$failed"
