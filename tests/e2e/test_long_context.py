"""Long contexts: N ranks that share positions say what one rank says, over the whole of a 32K prompt, and what an
independent forward pass says at sampled positions. WEFT_LONG_TOKENS sets another length."""

import os

import numpy as np
import pytest

import long_models
from api import Api
from cluster import Cluster

TOKENS = int(os.environ.get("WEFT_LONG_TOKENS", 32768))


def prompt():
    return np.random.default_rng(7).integers(0, long_models.VOCAB, TOKENS).tolist()


def log_probabilities(model, ranks, ids):
    """Of each token of the prompt but the first, and of the most probable ones at its place: [tokens - 1, 1 + 5]."""
    with Cluster(model, "-tp", ranks, "-dcp", ranks, "--skip-tokenizer-init", "--kv-cache-dtype=float32",
                 "--max-num-batched-tokens=1024", "--max-num-seqs=1024", "--max-stream-buffer-bytes=256MiB",
                 "--stall-timeout=60s") as cluster:
        api = Api(cluster.address)
        first = next(m for m in api.callable("Generate")(
            {"token_ids": {"ids": ids}, "sampling": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 5}},
            timeout=3000) if m.prompt_logprobs)
        api.close()
        return np.array([[p.token.logprob] + sorted((t.logprob for t in p.top[:5]), reverse=True)
                         for p in first.prompt_logprobs])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_layout_says_over_a_long_context_what_one_rank_says(kind, tmp_path):
    model = long_models.write(tmp_path, kind)
    ids = prompt()
    alone = log_probabilities(model, 1, ids)
    assert alone.shape == (TOKENS - 1, 6)
    # The last of the context, and others all over it.
    sampled = np.unique(np.concatenate([np.arange(0, TOKENS - 1, TOKENS // 200),
                                        np.arange(TOKENS - 20, TOKENS - 1)]))
    reference = long_models.forward(kind, np.array(ids), sampled)
    want = reference[np.arange(len(sampled)), np.array(ids)[sampled + 1]]
    difference = np.abs(alone[sampled, 0] - want).max()
    print(f"{kind}: {difference:.1e} from the independent forward pass at {len(sampled)} positions")
    assert difference < 1e-3
    for ranks in (2, 4, 8):
        got = log_probabilities(model, ranks, ids)
        apart = np.abs(got - alone).max()
        print(f"{kind}: N = {ranks} is {apart:.1e} from N = 1 over {TOKENS} positions")
        assert apart < 1e-3
