"""A prompt computed by one group of processes and continued by another, over UCX, through the router."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request

import pytest

from api import Api, joined
from cluster import BIN, ENV, ROOT, Cluster, alive, children, command_line, golden, golden_dir, \
    leaked_shared_memory, wait_until

SMOLLM2_FP32 = ROOT / "models/smollm2-135m-instruct-fp32"
SEED = int(os.environ.get("WEFT_PD_SEED", "20261129"))


class PdCluster(Cluster):
    """`weft serve` with a prefill group: prompts of any length are handed over."""

    def __init__(self, model, *flags, **options):
        super().__init__(model, "--pd-min-prefill-tokens=1", *flags, **options)

    def groups(self):
        """{kv_role: group}, or None while nobody answers."""
        out = subprocess.run([BIN / "weft", "status", "--address", self.address, "--format=json"],
                             env=ENV, capture_output=True, text=True)
        return {g.get("kv_role"): g for g in json.loads(out.stdout)["groups"]} if out.returncode == 0 else None

    def wait_ready(self):
        def ready():
            groups = self.groups()
            return groups and all(g["ready"] for g in groups.values()) and groups
        return wait_until(ready, self.timeout, "both groups ready")

    def ranks(self, role):
        """{rank: pid} of one of the groups."""
        pids = {}
        for pid in children(self.process.pid):
            line = command_line(pid)
            if f'"kv_role":"{role}"' in line and (match := re.search(r"--rank=(\d+)", line)):
                pids[int(match.group(1))] = pid
        return pids

    def metric(self, name, **labels):
        """The sum over all processes of a metric's series with these labels."""
        total = 0
        groups = self.groups()
        info = json.loads(subprocess.run([BIN / "weft", "status", "--address", self.address, "--format=json"],
                                         env=ENV, capture_output=True, text=True).stdout)
        addresses = [r["metrics_address"] for g in groups.values() for r in g["ranks"]]
        for address in addresses + [info["metrics_address"]]:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                        total += float(line.rpartition(" ")[2])
        return total

    def wait_blocks_back(self, timeout=10):
        def back():
            groups = self.groups()
            return groups and all(g["ready"] and g["num_free_blocks"] == g["num_blocks"] for g in groups.values())
        wait_until(back, timeout, "every block of both groups is free")
        wait_until(lambda: self.metric("weft_kv_transfer_inflight") == 0, timeout, "no transfer is open")


def layout(t, n, v, i, prefix=""):
    return [f"--{prefix}tensor-parallel-size", t, f"--{prefix}decode-context-parallel-size", n,
            f"--{prefix}cp-kv-cache-interleave-size", v // n if i == "B" else i]


def cells():
    ranks = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    return itertools.product(["llama_gqa", "llama_odd", "deepseek_v2_lite"], ranks, ranks, [1, 4, "B"], [1, 4, "B"],
                             ["layerwise", "blockwise"])


def pairwise():
    """Few cells in which every pair of choices occurs."""
    everything = list(cells())
    random.Random(SEED).shuffle(everything)
    pairs = {c: set(itertools.combinations(enumerate(c), 2)) for c in everything}
    missing = set().union(*pairs.values())
    cover = []
    while missing:
        best = max(everything, key=lambda c: len(pairs[c] & missing))
        cover.append(best)
        missing -= pairs[best]
    return cover


CELLS = pairwise() if "CI" in os.environ else random.Random(SEED).sample(pairwise(), 6)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_pairs_of_layouts_give_the_references_tokens(cell, tmp_path):
    checkpoint, prefill, decode, prefill_i, decode_i, mode = cell
    prompts = golden(checkpoint)
    lines = [{"prompt_token_ids": p["ids"], "max_tokens": len(p["greedy"])} for p in prompts.values()]
    prompts_file = tmp_path / "prompts.jsonl"
    prompts_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    v = 16
    config = json.dumps({"kv_role": "kv_both", "mode": mode})
    with PdCluster(golden_dir(checkpoint), *layout(*decode, v, decode_i), *layout(*prefill, v, prefill_i, "prefill-"),
                   "--block-size", v, "--kv-transfer-config", config, "--kv-transfer-checksum",
                   "--max-num-batched-tokens", 24, "--dtype=float32", "--kv-cache-dtype=float32") as cluster:
        got = cluster.generate("--prompts-file", prompts_file, "--temperature=0", "--ignore-eos")
        assert [g["token_ids"] for g in got] == [p["greedy"] for p in prompts.values()]
        assert cluster.metric("weft_router_handoffs_total", outcome="done") == len(lines)
        assert cluster.metric("weft_router_handoffs_total", outcome="failed") == 0
        sent = cluster.metric("weft_kv_transfer_bytes_total", direction="sent")
        assert sent == cluster.metric("weft_kv_transfer_bytes_total", direction="received") > 0
        cluster.wait_blocks_back()
        assert cluster.stop() == 0


@pytest.fixture(scope="module")
def smollm2():
    """T=1 computes prompts for T=2, N=2."""
    with PdCluster(SMOLLM2_FP32, "-tp", 2, "-dcp", 2, "--prefill-tensor-parallel-size=1", "--max-model-len=2K",
                   "--kv-cache-memory-bytes=128MiB", "--kv-transfer-lease=5s", "--no-enable-prefix-caching") as cluster:
        yield cluster


def reference():
    return json.loads(golden_dir("smollm2.json").read_text())["prompts"]


def right_answers(cluster):
    for prompt in reference()[:2]:
        got = cluster.generate("--prompt-token-ids", ",".join(map(str, prompt["ids"])), "--temperature=0",
                               f"--max-tokens={len(prompt['fp32']['greedy'])}")[0]
        assert got["token_ids"] == prompt["fp32"]["greedy"]


def test_the_real_models_tokens_are_the_references(smollm2):
    before = smollm2.metric("weft_router_handoffs_total", outcome="done")
    right_answers(smollm2)
    assert smollm2.metric("weft_router_handoffs_total", outcome="done") == before + 2
    smollm2.wait_blocks_back()


def test_what_either_side_has_cached_is_not_sent_or_not_computed():
    """The decode group says what it has; what the prefill group has is sent without being computed."""
    prompt = [7 + i % 97 for i in range(400)]
    ask = lambda cluster, ids: cluster.generate("--prompt-token-ids", ",".join(map(str, ids)), "--temperature=0",
                                                "--ignore-eos", "--max-tokens=8")[0]["token_ids"]
    flags = ["--max-model-len=1K", "--kv-cache-memory-bytes=128MiB", "--no-enable-prefix-caching"]
    with Cluster(SMOLLM2_FP32, "-tp", 2, "-dcp", 2, *flags) as one:
        expected = [ask(one, prompt), ask(one, prompt[:300] + [9] * 50)]
    with PdCluster(SMOLLM2_FP32, "-tp", 2, "-dcp", 2, "--prefill-tensor-parallel-size=1", *flags[:2]) as cluster:
        sent = []
        for ids, answer in zip([prompt, prompt, prompt[:300] + [9] * 50], [expected[0], *expected]):
            before = cluster.metric("weft_kv_transfer_bytes_total", direction="sent")
            assert ask(cluster, ids) == answer
            sent.append(cluster.metric("weft_kv_transfer_bytes_total", direction="sent") - before)
        # Blocks of 128: the second time 384 positions are there, then 256.
        assert [round(s / sent[0] * 400) for s in sent] == [400, 16, 350 - 256]
        cluster.wait_blocks_back()


def test_text_sampling_and_logprobs_are_those_of_one_group(smollm2):
    """The same requests with and without the hand-off: sampled, penalized, with logprobs and stop strings."""
    prompt = {"ids": reference()[0]["ids"]}
    requests = [{"temperature": 0}, {"temperature": 0.7, "seed": 5}, {"temperature": 1, "seed": 6, "top_k": 8},
                {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"temperature": 0, "logprobs": 3},
                {"temperature": 0, "max_tokens": 1}, {"temperature": 0, "min_tokens": 5}, {"temperature": 1, "seed": 3, "n": 2},
                {"temperature": 0, "prompt_logprobs": 1}, {"temperature": 0, "stop": ["France"], "max_tokens": 40}]

    def outcomes(cluster):
        api = Api(cluster.address)
        found = []
        for sampling in requests:
            messages = api.generate(token_ids=prompt, sampling={"max_tokens": 12, "ignore_eos": True, **sampling})
            for index in range(sampling.get("n", 1)):
                ids, text, last = joined(messages, index)
                logprobs = [round(m.token.logprob, 2) for r in messages if r.index == index for m in r.logprobs]
                found.append((ids, text, last.finish_reason, last.usage.completion_tokens, logprobs,
                              sum(len(m.prompt_logprobs) for m in messages)))
        api.close()
        return found

    handed = outcomes(smollm2)
    with Cluster(SMOLLM2_FP32, "-tp", 2, "-dcp", 2, "--max-model-len=2K", "--kv-cache-memory-bytes=128MiB") as one:
        assert handed == outcomes(one)
    smollm2.wait_blocks_back()


class Stream:
    """A long prompt in the background."""

    def __init__(self, cluster, num_prompt=600, num_output=40):
        self.process = subprocess.Popen(
            [BIN / "weft", "generate", "--address", cluster.address, "--format=json", "--ignore-eos", "--temperature=0",
             "--prompt-token-ids=" + ",".join(["7"] * num_prompt), f"--max-tokens={num_output}"],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, timeout=60):
        out, _ = self.process.communicate(timeout=timeout)
        return json.loads(out.splitlines()[0])

    def vanish(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(smollm2):
    return Stream(smollm2).end()["token_ids"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("role,rank", [("kv_producer", 0), ("kv_consumer", 0), ("kv_consumer", 1)])
def test_a_lost_rank_of_either_side_costs_a_pause(smollm2, undisturbed, role, rank, sig):
    draw = random.Random(f"{SEED}-{role}-{rank}-{sig}")
    streams = [Stream(smollm2) for _ in range(2)]
    wait_until(lambda: (g := smollm2.groups()) and g["kv_producer"]["num_requests_running"], 20, "prefill runs")
    time.sleep(draw.uniform(0, 2))
    tree = set(children(smollm2.process.pid))
    os.kill(smollm2.ranks(role)[rank], sig)
    for stream in streams:
        assert stream.end().get("token_ids") == undisturbed
    smollm2.wait_ready()
    smollm2.wait_blocks_back()
    assert leaked_shared_memory({p for p in tree if not alive(p)}) == []
    right_answers(smollm2)


def test_a_paused_prefill_rank_wakes_up_to_a_transfer_that_is_over(smollm2, undisturbed):
    """Shorter than its supervisor's patience, longer than nothing: late messages are dropped or in time."""
    streams = [Stream(smollm2) for _ in range(2)]
    wait_until(lambda: (g := smollm2.groups()) and g["kv_producer"]["num_requests_running"], 20, "prefill runs")
    pid = smollm2.ranks("kv_producer")[0]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    streams[0].vanish()  # its blocks go to others
    others = [Stream(smollm2) for _ in range(2)]
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    for stream in [streams[1], *others]:
        assert stream.end().get("token_ids") == undisturbed
    smollm2.wait_ready()
    smollm2.wait_blocks_back()


def test_clients_that_vanish_in_any_phase_leave_nothing_behind(smollm2, undisturbed):
    draw = random.Random(SEED)
    for _ in range(6):
        streams = [Stream(smollm2) for _ in range(3)]
        time.sleep(draw.uniform(0.05, 2))
        for stream in streams[:2]:
            stream.vanish()
        assert streams[2].end().get("token_ids") == undisturbed
    smollm2.wait_blocks_back()


def test_without_a_prefill_group_the_decode_group_computes(smollm2, undisturbed):
    supervisor = next(p for p in children(smollm2.process.pid)
                      if '"kv_role":"kv_producer"' in command_line(p) and "--rank=" not in command_line(p))
    stopped = [supervisor, *smollm2.ranks("kv_producer").values()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert Stream(smollm2).end().get("token_ids") == undisturbed
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):  # one that was taken for stalled, and killed
                os.kill(pid, signal.SIGCONT)
    smollm2.wait_ready()
    smollm2.wait_blocks_back()
    assert Stream(smollm2).end().get("token_ids") == undisturbed
