"""One request that no rank could hold, served by ranks that share its positions; run by scripts/long_context.sh.

    long_request.py TOKENS RANKS POOL_BYTES
"""

import json
import subprocess
import sys
import tempfile
import time

import numpy as np

import long_models
from cluster import BIN, ENV, Cluster

tokens, ranks, pool = map(int, sys.argv[1:])
with tempfile.TemporaryDirectory() as directory:
    model = long_models.write(directory, "mqa")
    flags = ["-tp", ranks, "--kv-cache-memory-bytes", pool, "--kv-cache-dtype=float32", "--skip-tokenizer-init",
             "--max-model-len", tokens + 64, "--max-num-batched-tokens=1024", "--stall-timeout=60s",
             "--log-stats-interval=30s"]
    refused = subprocess.run([BIN / "weft-worker", model, *map(str, flags[:4]), "--kv-cache-dtype=float32",
                              "--max-model-len", str(tokens + 64), "--metrics-port=-1", "--max-failed-starts=1",
                              "--listen=unix-abstract:weft-long-request"], env=ENV, capture_output=True, text=True)
    assert refused.returncode != 0 and "the KV cache holds" in refused.stderr, refused.stderr
    print(f"{ranks} ranks, each with the whole context: "
          + next(line for line in refused.stderr.splitlines() if "the KV cache holds" in line))

    ids = np.random.default_rng(11).integers(0, long_models.VOCAB, tokens)
    prompts = model / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": ids.tolist(), "max_tokens": 8}) + "\n")
    with Cluster(model, *flags, "-dcp", ranks) as cluster:
        start = time.monotonic()
        out = subprocess.run([BIN / "weft", "generate", "--address", cluster.address, "--format=json",
                              "--prompts-file", prompts, "--temperature=0", "--ignore-eos"],
                             env=ENV, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr + out.stdout + "".join(cluster.log)
        seconds = time.monotonic() - start
        got = json.loads(out.stdout)["token_ids"]
        group = cluster.status()
        print(f"{ranks} ranks that share it by position: {tokens} tokens served in {seconds:.0f} s, "
              f"{group['kv_bytes_per_token_per_rank']} KV bytes per token and rank, {pool} bytes of pool a rank")
    # Token by token: what an independent forward pass gives after the prompt and the tokens so far.
    ids = ids.tolist()
    for token in got:
        chances = long_models.forward("mqa", np.array(ids), np.array([len(ids) - 1]))[0]
        assert chances[token] > chances.max() - 1e-4, (len(ids), token, int(chances.argmax()))
        ids.append(token)
    print(f"its {len(got)} tokens are those of an independent forward pass")
