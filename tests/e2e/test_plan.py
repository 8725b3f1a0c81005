"""`weft plan`, the program: a published config in, layouts as JSON and text out."""

import json
import os
import subprocess

import pytest

from cluster import BIN, ROOT, golden_dir

KIMI = ROOT / "../shared/goldens/configs/kimi-k2.json"


def plan(*flags):
    return subprocess.run([BIN / "weft", "plan", *map(str, flags)], capture_output=True, text=True, timeout=30)


@pytest.mark.skipif("CI" not in os.environ and not KIMI.exists(), reason="kimi-k2.json is missing")
def test_kimi_holds_what_was_published():
    out = plan("--model", KIMI, "-tp", 8, "--kv-cache-dtype=fp8", "--kv-cache-memory-bytes=94.7GiB",
               "--context=64K", "--format=json")
    assert out.returncode == 0, out.stderr
    layouts = {p["decode_context_parallel_size"]: p for p in json.loads(out.stdout)}
    assert sorted(layouts) == [1, 2, 4, 8]
    assert (layouts[1]["max_sequences"], layouts[8]["max_sequences"]) == (44, 353)
    assert (layouts[1]["kv_copies"], layouts[8]["kv_copies"]) == (8, 1)
    assert layouts[8]["kv_bytes_per_token_per_rank"] == 61 * 576 // 8
    assert layouts[8]["recommended"]
    text = plan(KIMI, "-tp", 8, "--dtype=nvfp4", "--kv-cache-dtype=fp8", "--gpu=b200", "--context=1K,64K")
    assert text.returncode == 0 and "recommended: T=8 N=8" in text.stdout, text.stdout + text.stderr


def test_a_directory_is_planned_without_its_weights(tmp_path):
    (tmp_path / "config.json").write_text((golden_dir("llama_gqa") / "config.json").read_text())
    out = plan(tmp_path, "--kv-cache-memory-bytes=1MiB", "-tp", 2, "-dcp", 2, "--format=json")
    assert out.returncode == 0, out.stderr
    (layout,) = json.loads(out.stdout)
    assert layout["context"] == 512 and layout["max_sequences"] > 0


@pytest.mark.parametrize("flags,mention", [
    ([], "no model"),
    (["nowhere.json", "--gpu=h200"], "nowhere.json"),
    (["MODEL"], "--device-memory, --kv-cache-memory-bytes, or --gpu, one of a100, h100, h200, b200"),
    (["MODEL", "--device-memory=1GiB", "--kv-cache-memory-bytes=1GiB"], "both given"),
    (["MODEL", "--device-memory=1GiB", "--context=1x"], "\"1x\""),
    (["MODEL", "--device-memory=1GiB", "-tp", "4", "-dcp", "3"], "must divide --tensor-parallel-size 4"),
], ids=str)
def test_bad_input_is_one_line(flags, mention):
    out = plan(*[golden_dir("llama_gqa") if f == "MODEL" else f for f in flags])
    assert out.returncode == 78
    assert mention in out.stderr and len(out.stderr.splitlines()) == 1, out.stderr
