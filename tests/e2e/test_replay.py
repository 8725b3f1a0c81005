"""A stream whose group dies goes on, at another group or when its own is back: the client sees a pause and nothing
else."""

import concurrent.futures
import os
import pathlib
import random
import signal
import tempfile
import time

import pytest

from api import Api, joined
from chaos import Process
from cluster import ROOT, Cluster, free_port, golden, golden_dir, wait_until
from pd_rig import Stream, config, quiet

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


def drawn():
    seed = int(os.environ.get("WEFT_REPLAY_SEED", random.randrange(2**32)))
    return seed, random.Random(seed)


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
    seed, draw = drawn()
    with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as pool:
        undisturbed = list(pool.map(lambda r: outcome(api, r), REQUESTS))
        assert all(len(ids) == NUM_TOKENS for samples, _ in undisturbed for ids, *_ in samples)
        for _ in range(4):
            seen, enough = [], draw.randrange(2 * NUM_TOKENS)  # of at least 5 * NUM_TOKENS messages
            running = [pool.submit(outcome, api, r, seen) for r in REQUESTS]
            wait_until(lambda: len(seen) >= enough, 60, f"{enough} messages")
            os.kill(cluster.rank_pids()[draw.randrange(2)], signal.SIGKILL)
            assert [r.result(timeout=120) for r in running] == undisturbed, f"WEFT_REPLAY_SEED={seed}"


# --- Every token index, with groups so quick that many deaths take no time.

TINY = "llama_gqa"
PROMPT = golden(TINY)["len33"]
LENGTH = 16
TINY_FLAGS = [f"--model={golden_dir(TINY)}", "-tp", 2, "-dcp", 2, "--dtype=float32", "--kv-cache-dtype=float32",
              "--block-size=16", "--max-model-len=192", "--num-gpu-blocks-override=400", "--threads-per-rank=1",
              "--max-restart-backoff=200ms", "--metrics-port=-1", "--log-level=warn"]
GREEDY = {"temperature": 0}
PENALTIES = {"temperature": 1, "seed": 11, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
             "presence_penalty": 0.2, "logprobs": 1}
WITHIN_SECONDS = 150


class Groups:
    """Groups of two ranks behind one router, each a process of its own. Use as a context manager."""

    def __init__(self, *flags_of_groups):
        self.folder = tempfile.TemporaryDirectory()
        log = lambda name: pathlib.Path(self.folder.name, name + ".log")
        ports = [free_port() for _ in range(len(flags_of_groups) + 1)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.groups = [Process(f"group{i}", log(f"group{i}"), "weft-worker", *TINY_FLAGS, *flags, f"--listen={address}")
                       for i, (flags, address) in enumerate(zip(flags_of_groups, addresses))]
        self.router = Process("router", log("router"), "weft-router", f"--model={golden_dir(TINY)}", f"--port={ports[-1]}",
                              f"--groups={','.join(addresses[:-1])}", "--routing-policy=round-robin",
                              "--pd-min-prefill-tokens=1", "--metrics-port=-1", "--log-level=warn")
        self.address, self.api = addresses[-1], None

    def __enter__(self):
        self.api = wait_until(lambda: quiet(lambda: Api(self.address)), 30, "the router")
        self.wait_ready()
        return self

    def __exit__(self, *_):
        if self.api:
            self.api.close()
        for process in [self.router, *self.groups]:
            process.stop()
        print("".join(path.read_text(errors="replace")[-4000:] for path in pathlib.Path(self.folder.name).iterdir()))
        self.folder.cleanup()

    def wait_ready(self):
        def ready():
            return (all(len(self.ranks(i)) == 2 for i in range(len(self.groups))) and
                    all(g.ready for g in self.api.call("GetServerInfo").groups))
        wait_until(lambda: quiet(ready), 60, "all groups are ready")

    def ranks(self, group):
        return self.groups[group].victims()[1:]

    def start(self, sampling):
        return Stream(self.api.call("Generate", {"token_ids": {"ids": PROMPT["ids"]}, "sampling": {
            "ignore_eos": True, "max_tokens": LENGTH, **sampling}}))


def seen_by_client(stream):
    """The whole stream, in a form that can be compared."""
    assert isinstance(stream.end(), list), stream.error
    assert [m.seq for m in stream.messages] == list(range(len(stream.messages)))
    ids, text, last = joined(stream.messages)
    logprobs = [round(m.token.logprob, 2) for r in stream.messages for m in r.logprobs]
    return ids, text, last.finish_reason, last.stop, last.usage.completion_tokens, logprobs


def stops_of_two_tokens(api, ids):
    """{n: a string whose end is in the n-th token of `ids`, and its beginning in one before}."""
    texts = [api.call("Detokenize", {"token_ids": ids[:n]}).text.rstrip("\ufffd") for n in range(len(ids) + 1)]
    found = {}
    for n in range(2, len(ids) + 1):
        before = len(texts[n - 1])
        for begin in range(max(0, before - 4), before):
            stop = texts[n][begin:before + 1]
            if len(texts[n]) > before and "\ufffd" not in stop and texts[n].find(stop) == begin:
                found[n] = stop
    return found


def freeze_and_kill(groups, victims, streams):
    """Kills `victims` when nothing more comes of them. Returns how many tokens each stream had that was not over."""
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)
    while True:
        before = [len(s.messages) for s in streams]
        time.sleep(0.1)
        if before == [len(s.messages) for s in streams]:
            break
    indices = [len(s.ids) if s.thread.is_alive() else None for s in streams]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return indices


def aim(draw, hit, split, names, streams):
    """Waits until a stream is about where none has been stopped yet; what comes until it stops is a matter of luck."""
    goals = [(name, index) for name in hit for index in set(range(LENGTH)) - hit[name]]
    goals += [(name, name - 1) for name in names if name not in hit and name not in split]
    name, index = draw.choice(goals)
    stream = draw.choice([s for n, s in zip(names, streams) if n == name])
    stream.wait(lambda s: len(s.ids) >= index - draw.randrange(8), f"{index} tokens")


PD = [config("kv_producer")], [config("kv_consumer")], [config("kv_consumer")]


@pytest.mark.parametrize("flags_of_groups", [([], []), PD], ids=["pd_off", "pd_on"])
def test_streams_go_on_from_every_token(flags_of_groups):
    """All of a round's streams are stopped where they are, then a rank of one group or of every group is killed."""
    seed, draw = drawn()
    first = len(flags_of_groups) - 2  # of the two groups that decode
    with Groups(*flags_of_groups) as groups:
        plain = groups.start({**GREEDY}).end()
        assert plain == PROMPT["greedy"][:LENGTH]
        stops = stops_of_two_tokens(groups.api, plain)
        assert len(stops) >= LENGTH / 4, stops
        samplings = {"greedy": GREEDY, "penalties": PENALTIES} | {n: {**GREEDY, "stop": [stop]} for n, stop in stops.items()}
        undisturbed = {name: seen_by_client(groups.start(s)) for name, s in samplings.items()}
        assert all(len(undisturbed[n][0]) == n and undisturbed[n][3] == stop for n, stop in stops.items())

        hit = {"greedy": set(), "penalties": set()}
        split, rounds, until = set(), 0, time.monotonic() + WITHIN_SECONDS
        while min(map(len, hit.values())) < LENGTH or len(split) < 2:
            assert time.monotonic() < until, f"{rounds} rounds: {hit}, {split}, WEFT_REPLAY_SEED={seed}"
            rounds += 1
            names = [name for name in ("greedy", "penalties") for _ in range(16)] + [n for n in stops if n not in split]
            draw.shuffle(names)
            harmed = draw.choice([[first], [first + 1], range(len(flags_of_groups))])
            victims = [draw.choice(groups.ranks(group)) for group in harmed]
            streams = [groups.start(samplings[name]) for name in names]
            aim(draw, hit, split, names, streams)
            for name, index in zip(names, freeze_and_kill(groups, victims, streams)):
                if index is not None:
                    hit.get(name, set()).add(index)
                    if name in stops and index == name - 1:
                        split.add(name)
            for name, stream in zip(names, streams):
                assert seen_by_client(stream) == undisturbed[name], (name, f"WEFT_REPLAY_SEED={seed}")
            groups.wait_ready()
        print(f"{rounds} rounds, stop strings split at {sorted(split)}")
