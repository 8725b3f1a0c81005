#!/usr/bin/env bash
# A request of 200,000 tokens on 4 ranks with a KV pool of 8 MiB each, which holds 65,536 of its tokens: refused
# when every rank keeps the whole context, served when they share it by position, and the answer checked. Needs a
# build; minutes on two cores.
#   scripts/long_context.sh [TOKENS [RANKS [POOL_BYTES]]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python tests/e2e/long_request.py "${1:-200000}" "${2:-4}" "${3:-8388608}"
