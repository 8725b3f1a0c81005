"""A stream whose group dies goes on when the group is back: the client sees a pause and nothing else."""

import concurrent.futures
import os
import random
import signal

import pytest

from api import Api, joined
from cluster import ROOT, Cluster, wait_until

MODEL = ROOT / "models/smollm2-135m-instruct-fp32"
FLAGS = ["-tp", 2, "-dcp", 2, "--max-model-len=2K", "--kv-cache-memory-bytes=256MiB"]
NUM_TOKENS = 120
REQUESTS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1, "seed": 11, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0, "stop": ["no such text"], "prompt_logprobs": 1, "logprobs": 2},
    {"temperature": 1, "seed": 3, "n": 2},
]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(MODEL, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def api(cluster):
    client = Api(cluster.address)
    yield client
    client.close()


def outcome(api, sampling, seen=None):
    """What the client of one request sees. Each message adds to `seen` when it comes."""
    messages = []
    for message in api.call("Generate", {"text": "Once upon a time", "sampling": {
            "ignore_eos": True, "max_tokens": NUM_TOKENS, **sampling}}):
        messages.append(message)
        if seen is not None:
            seen.append(1)
    assert [m.seq for m in messages] == list(range(len(messages)))
    samples = []
    for index in range(sampling.get("n", 1)):
        ids, text, last = joined(messages, index)
        logprobs = [round(m.token.logprob, 2) for r in messages if r.index == index for m in r.logprobs]
        samples.append((ids, text, last.finish_reason, last.usage.completion_tokens, logprobs))
    return samples, sum(len(m.prompt_logprobs) for m in messages)


def test_streams_equal_an_undisturbed_run_whenever_a_rank_dies(cluster, api):
    seed = int(os.environ.get("WEFT_REPLAY_SEED", random.randrange(2**32)))
    draw = random.Random(seed)
    with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as pool:
        undisturbed = list(pool.map(lambda r: outcome(api, r), REQUESTS))
        assert all(len(ids) == NUM_TOKENS for samples, _ in undisturbed for ids, *_ in samples)
        for _ in range(4):
            seen, enough = [], draw.randrange(2 * NUM_TOKENS)  # of at least 5 * NUM_TOKENS messages
            running = [pool.submit(outcome, api, r, seen) for r in REQUESTS]
            wait_until(lambda: len(seen) >= enough, 60, f"{enough} messages")
            os.kill(cluster.rank_pids()[draw.randrange(2)], signal.SIGKILL)
            assert [r.result(timeout=120) for r in running] == undisturbed, f"WEFT_REPLAY_SEED={seed}"
