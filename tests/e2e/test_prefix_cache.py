"""Prefix caching as clients see it: usage, salts, scored prompts, metrics, status."""

import json
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from api import Api, joined
from cluster import BIN, ENV, ROOT, Cluster, golden, golden_dir, wait_until

MODEL = "llama_gqa"
PROMPTS = golden(MODEL)
FLAGS = ["-tp", 2, "-dcp", 2, "--block-size=16", "--dtype=float32", "--kv-cache-dtype=float32"]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(golden_dir(MODEL), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def api(cluster):
    client = Api(cluster.address)
    yield client
    client.close()


def generate(api, ids, max_tokens=1, salt="", **sampling):
    """(token ids, cached tokens, all messages)"""
    messages = api.generate(token_ids={"ids": ids}, cache_salt=salt, sampling={
        "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    tokens, _, last = joined(messages)
    assert all(m.usage.cached_tokens == last.usage.cached_tokens for m in messages)
    return tokens, last.usage.cached_tokens, messages


def metric(cluster, name):
    address = wait_until(lambda: cluster.status()["ranks"], 5, "ranks")[0]["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return sum(float(line.rpartition(" ")[2]) for line in answer.read().decode().splitlines()
                   if line.startswith((name + " ", name + "{")))


def test_the_second_same_request_finds_the_first(api):
    prompt = PROMPTS["len130"]
    tokens, cached, _ = generate(api, prompt["ids"], 48)
    assert tokens == prompt["greedy"] and cached == 0
    tokens, cached, _ = generate(api, prompt["ids"], 48)
    assert tokens == prompt["greedy"] and cached == 128
    # The next turn finds the answer, too: 130 and 40 tokens are ten full blocks.
    tokens, cached, _ = generate(api, prompt["ids"] + prompt["greedy"][:40], 8)
    assert tokens == prompt["greedy"][40:] and cached == 160


def test_samples_share_their_prompt(api, cluster):
    ids = [(7 * i) % 300 + 3 for i in range(100)]
    before = metric(cluster, "weft_prefix_cache_hits_total")
    messages = api.generate(token_ids={"ids": ids}, sampling={"n": 4, "max_tokens": 4, "ignore_eos": True})
    assert sorted({m.index for m in messages}) == [0, 1, 2, 3]
    assert metric(cluster, "weft_prefix_cache_hits_total") - before == 3 * 96


def test_a_salt_keeps_tenants_apart(api):
    prompt = PROMPTS["len33"]
    for salt, cached in [("a", 0), ("a", 32), ("b", 0), ("", 0), ("b", 32), ("", 32)]:
        tokens, found, _ = generate(api, prompt["ids"], 48, salt)
        assert tokens == prompt["greedy"] and found == cached, salt


def test_a_scored_prompt_is_computed_and_scored_as_the_reference_does(api):
    prompt = PROMPTS["len33"]
    generate(api, prompt["ids"])
    tokens, cached, messages = generate(api, prompt["ids"], 48, prompt_logprobs=0)
    assert tokens == prompt["greedy"] and cached == 0
    got = [p.token.logprob for m in messages for p in m.prompt_logprobs]
    assert got == pytest.approx(prompt["prompt_logprobs"][1:], abs=1e-3)


def test_status_tells_of_the_cache(cluster, api):
    generate(api, PROMPTS["len33"]["ids"])
    group = wait_until(lambda: (g := cluster.status())["num_cached_blocks"] and g, 5, "cached blocks")
    assert group["prefix_caching"] and int(group["prefix_cache_queries"]) > int(group["prefix_cache_hits"])
    text = subprocess.run([BIN / "weft", "status", "--address", cluster.address], env=ENV, capture_output=True,
                          text=True, check=True).stdout
    assert "prompt tokens found" in text
    assert metric(cluster, "weft_kv_cache_usage_ratio") == 0  # nobody holds what is cached


def test_blocks_leave_for_others_and_are_computed_again():
    with Cluster(golden_dir(MODEL), *FLAGS, "--max-model-len=256", "--num-gpu-blocks-override=16") as small:
        client = Api(small.address)
        prompt = PROMPTS["len130"]
        for round_ in range(2):
            tokens, cached, _ = generate(client, prompt["ids"], 48)
            assert tokens == prompt["greedy"] and cached == 0
            generate(client, [round_ + 3] * 250)
        # 12 and 16 blocks in turn, of which 11 and 15 are full, in 16: the second evicts all 11, the third 11 of
        # 15, the fourth what is left of both.
        assert metric(small, "weft_prefix_cache_evictions_total") == 11 + 11 + 15
        assert metric(small, "weft_prefix_cache_hits_total") == 0
        client.close()


def test_it_can_be_off():
    with Cluster(golden_dir(MODEL), *FLAGS, "--no-enable-prefix-caching") as off:
        client = Api(off.address)
        for _ in range(2):
            assert generate(client, PROMPTS["len130"]["ids"], 48)[:2] == (PROMPTS["len130"]["greedy"], 0)
        group = off.status()
        assert not group["prefix_caching"] and not int(group["num_cached_blocks"])
        assert "prefix caching: off" in "".join(off.log)
        client.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_made_model_is_served(dtype, tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts/make_model.py", tmp_path / "model", "--hidden-size=64",
                    "--num-hidden-layers=2", "--num-attention-heads=4", "--num-key-value-heads=1",
                    "--intermediate-size=96", "--vocab-size=300", "--max-position-embeddings=512",
                    f"--dtype={dtype}"], check=True)
    out = subprocess.run(
        [BIN / "weft", "bench", "--model", tmp_path / "model", "--skip-tokenizer-init", "-tp", "2", "-dcp", "2",
         "--block-size=16", "--dataset=agentic", "--agentic-sessions=3", "--agentic-turns=4",
         "--agentic-prefix-len=64", "--agentic-turn-len=20", "--agentic-output-len=12", "--format=json"],
        env=ENV, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    assert result["completed"] == 12 and result["peak_running"] == 3
    # All but the first find the 64 tokens, or more, up to the block that is not full.
    assert result["total_cached_tokens"] >= 11 * 64
    assert result["total_input_tokens"] == 3 * sum(64 + 20 * (t + 1) + 12 * t for t in range(4))


def test_a_made_model_has_the_values_it_should(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts/make_model.py", tmp_path, "--hidden-size=64", "--vocab-size=300",
                    "--num-hidden-layers=1", "--num-attention-heads=4", "--num-key-value-heads=2",
                    "--intermediate-size=96", "--dtype=float32", "--untied"], check=True)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    del header["__metadata__"]
    assert len(header) == 12 and header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [32, 64]
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        values = np.frombuffer(data[8 + length + begin:8 + length + end], "<f4")
        assert len(values) == np.prod(tensor["shape"]), name
        assert (values == 1).all() if name.endswith("norm.weight") else 0.015 < values.std() < 0.025, name
