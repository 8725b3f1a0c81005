#!/usr/bin/env bash
# Sets up, builds, fetches SmolLM2-135M-Instruct and runs the main job: two worker processes that
# share one KV cache by position stream the answer to a prompt, through the router.
#
#   scripts/demo.sh [PROMPT]
#   scripts/demo.sh --pd [PROMPT]   a third process computes the prompt and hands its KV to the two, in
#                                   fp32; then the two do it alone, and the tokens are compared
set -euo pipefail
cd "$(dirname "$0")/.."
pd=0
if [ "${1:-}" = --pd ]; then pd=1; shift; fi
if [ $# -gt 1 ] || [[ "${1:-}" = -* ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
scripts/setup.sh
scripts/build.sh release weft weft-router weft-worker weft-plan
scripts/fetch_model.sh

chat() { printf '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n' "$1"; }
if [ "$pd" = 1 ]; then
  # Long enough that its KV is something to send.
  prompt=${1:-$(chat "What is this about?
$(sed -n 3,13p README.md)")}
  model=models/smollm2-135m-instruct-fp32
  scripts/fetch_model.sh --dtype float32 "$model"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  generate() {
    build/bin/weft generate --model "$model" --tensor-parallel-size 2 --decode-context-parallel-size 2 --format json \
      --kv-cache-dtype float32 --temperature 0 --max-tokens 64 --prompt "$prompt" "$@" 2>"$log" ||
      { cat "$log" >&2; exit 1; }
  }
  field() { .venv/bin/python -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$1" "$2"; }
  handed=$(generate --prefill-tensor-parallel-size 1 --log-level info)
  field "$handed" text
  grep -oE 'sent .* computed' "$log" || { cat "$log" >&2; echo "nothing was handed over" >&2; exit 1; }
  alone=$(generate)
  ids=$(field "$handed" token_ids)
  [ "$ids" = "$(field "$alone" token_ids)" ] ||
    { printf 'one group alone says:\n%s\n' "$(field "$alone" text)" >&2; exit 1; }
  echo "one group alone says the same, token for token: $ids"
  exit
fi
prompt=${1:-$(chat 'What is the capital of France?')}
printf '%s' "$prompt"
build/bin/weft generate --model models/smollm2-135m-instruct \
  --tensor-parallel-size 2 --decode-context-parallel-size 2 \
  --temperature 0 --max-tokens 64 --prompt "$prompt"
echo "To go on: build/bin/weft serve models/smollm2-135m-instruct -tp 2 -dcp 2"
