#!/usr/bin/env bash
# Sets up, builds, fetches SmolLM2-135M-Instruct and runs the main job: two worker processes that
# share one KV cache by position stream the answer to a prompt, through the router.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
scripts/build.sh release
scripts/fetch_model.sh

prompt=${1:-$'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n'}
exec build/bin/weft generate --model models/smollm2-135m-instruct \
  --tensor-parallel-size 2 --decode-context-parallel-size 2 \
  --temperature 0 --max-tokens 64 --prompt "$prompt"
