#!/usr/bin/env bash
# Long runs against real processes. Each prints what happened and a verdict (exit code 1: something is wrong);
# needs a build.
#
#   scripts/soak.sh [flat] [--requests 10000] [--chunks 20]
#       whether memory, descriptors and threads of a router and its ranks stay flat, one request in ten cancelled
#   scripts/soak.sh chaos [--seconds 300] [--streams 200] [--seed N]
#       whether every stream ends with the reference's tokens while processes are killed, stopped and restarted,
#       and no call fails while all of them are restarted in turn
#   scripts/soak.sh pd [--runs 20] [--all]
#       the tests of a prompt's hand-off between groups under faults, each run with timing and cases drawn by a
#       seed of its own; --all: every case, and the ones with the real model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1-}" = pd ]; then
  runs=20 tests=(tests/e2e/test_pd_faults.py)
  shift
  while [ $# -gt 0 ]; do
    case "$1" in
      --runs) runs=$2 && shift 2 ;;
      --all) export WEFT_PD_ALL=1 && tests+=(tests/e2e/test_pd.py) && shift ;;
      *) echo "scripts/soak.sh pd: unknown argument '$1'; there are --runs and --all" >&2; exit 2 ;;
    esac
  done
  for ((run = 1; run <= runs; ++run)); do
    seed=$((RANDOM * 32768 + RANDOM))
    echo "run $run of $runs: WEFT_PD_SEED=$seed"
    env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" WEFT_PD_SEED=$seed PYTHONDONTWRITEBYTECODE=1 \
      .venv/bin/python -m pytest -q -x -p no:cacheprovider "${tests[@]}" -k 'not pairs_of_layouts'
  done
  exit
fi
what=flat
case "${1-}" in flat | chaos) what=$1 && shift ;; esac
exec env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" .venv/bin/python "tests/e2e/$what.py" "$@"
