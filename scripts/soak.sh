#!/usr/bin/env bash
# Long runs against real processes. Each prints what happened and a verdict (exit code 1: something is wrong);
# needs a build.
#
#   scripts/soak.sh [flat] [--requests 10000] [--chunks 20]
#       whether memory, descriptors and threads of a router and its ranks stay flat, one request in ten cancelled
#   scripts/soak.sh chaos [--seconds 300] [--streams 200] [--seed N]
#       whether every stream ends with the reference's tokens while processes are killed, stopped and restarted,
#       and no call fails while all of them are restarted in turn
#   scripts/soak.sh pd [--runs 20]
#       the tests of a prompt's hand-off between groups under faults, with random timing by seed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1-}" = pd ]; then
  runs=20
  [ "${2-}" = --runs ] && runs=$3
  for ((run = 1; run <= runs; ++run)); do
    seed=$((RANDOM * 32768 + RANDOM))
    echo "run $run of $runs: WEFT_PD_SEED=$seed"
    env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" WEFT_PD_SEED=$seed PYTHONDONTWRITEBYTECODE=1 \
      .venv/bin/python -m pytest -q -x -p no:cacheprovider tests/e2e/test_pd.py -k 'lost or paused or vanish or without'
  done
  exit
fi
what=flat
case "${1-}" in flat | chaos) what=$1 && shift ;; esac
exec env WEFT_BIN_DIR="${WEFT_BIN_DIR:-$PWD/build/bin}" .venv/bin/python "tests/e2e/$what.py" "$@"
