#!/usr/bin/env bash
# Configures and builds one preset, or some targets of it: scripts/build.sh [release|debug|asan|tsan]
# [TARGET...]. build/bin is a link to the release's programs.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
# Clones of the project share what ccache has.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
cmake --preset "$preset" >/dev/null
targets=("${@:2}")
cmake --build "build/$preset" -j "$(nproc)" ${targets[@]:+--target "${targets[@]}"}
if [ "$preset" = release ]; then ln -sfn release/bin build/bin; fi
