#!/usr/bin/env bash
# Sets up, builds and runs the tests. Idempotent; quick the second time.
#
#   scripts/test.sh               release build: unit, end-to-end
#   scripts/test.sh --sanitizers  also asan (with ubsan) and tsan of what is labelled for them, and
#                                 every fuzzer for a minute
#   scripts/test.sh --all         everything, the long ones too (hours on two cores)
set -euo pipefail
cd "$(dirname "$0")/.."

export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
sanitizers=0 all=0
for argument in "$@"; do
  case "$argument" in
    --sanitizers) sanitizers=1 ;;
    --all) sanitizers=1 all=1 ;;
    *) echo "scripts/test.sh: unknown argument '$argument'; there are --sanitizers and --all" >&2; exit 2 ;;
  esac
done

scripts/setup.sh
if [ "$all" = 1 ]; then scripts/setup_deploy.sh --browser; else scripts/setup_deploy.sh; fi
scripts/fetch_model.sh
scripts/fetch_model.sh --dtype float32 models/smollm2-135m-instruct-fp32

jobs=$(nproc)
# ctest exits 0 when nothing matches; --no-tests=error makes that a failure.
run_tests() {
  (cd "build/$1" && ctest --output-on-failure --no-tests=error "${@:2}")
}

scripts/build.sh release
# Where nvcc is, the module for GPUs, of one architecture: tests/e2e/test_cuda.py opens it.
if PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null; then
  [ -f build/cuda/CMakeCache.txt ] ||
    cmake --preset cuda -DWEFT_CUDA_ARCHITECTURES=90a-real -DWEFT_TESTS=OFF >/dev/null
  scripts/build.sh cuda weft_cuda
fi
if [ "$all" = 1 ]; then
  run_tests release -LE '^full_product$'
  run_tests release -L '^full_product$' -j "$jobs"
else
  run_tests release -LE '^(long|e2e)$' -j "$jobs"
  # Most run alone: they start many processes, and some of them measure.
  run_tests release -L '^e2e$' -LE '^long$' -j "$jobs"
fi

if [ "$sanitizers" = 1 ]; then
  for preset in asan tsan; do
    cmake --preset "$preset" >/dev/null
    # Only what is labelled is built: the rest would take as long as the tests.
    cmake --build "build/$preset" -j "$jobs" --target "${preset}_tests"
    run_tests "$preset" -L "^$preset\$" -j "$jobs"
  done
  if [ "$all" = 1 ]; then
    cmake --build build/tsan -j "$jobs" --target tsan_all_tests
    run_tests tsan -L '^tsan_all$' -j "$jobs"
  fi
  scripts/fuzz.sh 60
fi

if [ "$all" = 1 ]; then
  scripts/mutants.sh
  scripts/image.sh --test || [ $? = 3 ] # 3: no container engine here, it says
fi
