#!/usr/bin/env bash
# Sets up, builds, fetches SmolLM2-135M-Instruct and runs the main job: two worker processes that
# share one KV cache by position stream the answer to a prompt, through the router.
#
#   scripts/demo.sh [PROMPT]
#   scripts/demo.sh --pd [PROMPT]   a third process computes the prompt and hands its KV to the two, in
#                                   fp32; then the two do it alone, and the tokens are compared
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
scripts/build.sh release
pd=0
if [ "${1:-}" = --pd ]; then pd=1; shift; fi
scripts/fetch_model.sh

prompt=${1:-$'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n'}
if [ "$pd" = 1 ]; then
  model=models/smollm2-135m-instruct-fp32
  scripts/fetch_model.sh --dtype float32 "$model"
  generate=(build/bin/weft generate --model "$model" --tensor-parallel-size 2 --decode-context-parallel-size 2
            --kv-cache-dtype float32 --temperature 0 --max-tokens 64 --prompt "$prompt")
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  handed=$("${generate[@]}" --prefill-tensor-parallel-size 1 --log-level info 2>"$log")
  grep -E 'kv transfer|tokens/s' "$log"
  alone=$("${generate[@]}" 2>/dev/null)
  printf '%s\n' "$handed"
  [ "$handed" = "$alone" ] || { printf 'one group alone says:\n%s\n' "$alone" >&2; exit 1; }
  echo "the same, word for word, as one group alone says"
  exit
fi
exec build/bin/weft generate --model models/smollm2-135m-instruct \
  --tensor-parallel-size 2 --decode-context-parallel-size 2 \
  --temperature 0 --max-tokens 64 --prompt "$prompt"
