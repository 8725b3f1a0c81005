"""When a rank dies: {each rank, supervisor} x {KILL, STOP} x {loading, idle, prefill, decode}."""

import json
import os
import signal
import subprocess
import time

import pytest

from cluster import BIN, ENV, Cluster, alive, children, golden, golden_dir, shared_memory, wait_until

MODEL = "llama_gqa"
FLAGS = ["-tp", 2, "-dcp", 2, "--block-size=16", "--dtype=float32", "--max-num-batched-tokens=8"]
RECOVERY_SECONDS = 20  # generous: the law's 5 s is about streams, checked below


def right_answer(cluster):
    prompt = golden(MODEL)["len33"]
    got = cluster.generate("--prompt-token-ids", ",".join(map(str, prompt["ids"])), "--temperature=0",
                           "--ignore-eos", "--max-tokens", len(prompt["greedy"]))
    assert got[0]["token_ids"] == prompt["greedy"]


class Stream:
    """A long request in the background."""

    def __init__(self, cluster, phase):
        # Prefill in chunks of 8 keeps the group in it for a while; decode needs a short prompt.
        ids = ",".join(["7"] * (480 if phase == "prefill" else 2))
        self.process = subprocess.Popen(
            [BIN / "weft", "generate", "--address", cluster.address, "--format=json",
             f"--prompt-token-ids={ids}", "--ignore-eos", "--temperature=0",
             "--max-tokens", "20" if phase == "prefill" else "500"],
            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, timeout):
        out, _ = self.process.communicate(timeout=timeout)
        return json.loads(out.splitlines()[0])


@pytest.mark.parametrize("phase", ["loading", "idle", "prefill", "decode"])
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("victim", ["rank0", "rank1", "supervisor"])
def test_a_lost_process_restarts_the_group(victim, sig, phase):
    before = shared_memory()
    with Cluster(golden_dir(MODEL), *FLAGS, wait=phase != "loading") as cluster:
        if phase == "loading":
            wait_until(lambda: len(cluster.rank_pids()) == 2, 10, "ranks started")
        streams = [Stream(cluster, phase) for _ in range(3)] if phase in ("prefill", "decode") else []
        if streams:
            wait_until(lambda: (cluster.status() or {}).get("num_requests_running"), 10, "running")
        supervisor, ranks = cluster.supervisor_pid(), cluster.rank_pids()
        pid = supervisor if victim == "supervisor" else ranks[int(victim[-1])]
        os.kill(pid, sig)
        struck = time.monotonic()

        for stream in streams:
            result = stream.end(timeout=10)
            if "error" in result:
                assert result["error"]["code"] == "UNAVAILABLE", result
                assert result["error"]["reason"] == "RANK_LOST", result
            assert time.monotonic() - struck < 6, "streams end within 5 s"

        def group_is_new():
            new = cluster.rank_pids()
            return len(new) == 2 and not set(new.values()) & set(ranks.values())
        wait_until(group_is_new, RECOVERY_SECONDS, "the group restarts as a whole")
        for old in [pid, *ranks.values()]:
            assert not alive(old)
        right_answer(cluster)
        tree = children(cluster.process.pid)
        assert cluster.stop() == 0
        assert not any(alive(p) for p in tree)
    assert shared_memory() <= before


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["KILL", "TERM", "INT"])
@pytest.mark.parametrize("phase", ["loading", "decode"])
def test_nothing_is_left_of_an_offline_call(sig, phase):
    before = shared_memory()
    process = subprocess.Popen(
        [BIN / "weft", "generate", "--model", golden_dir(MODEL), *map(str, FLAGS), "--prompt-token-ids=5,6",
         "--ignore-eos", "--max-tokens=500", "--temperature=0"],
        env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: len(children(process.pid)) >= 4, 20, "children started")
    if phase == "decode":
        process.stdout.read(1)
    tree = children(process.pid)
    process.send_signal(sig)
    process.wait(20)
    wait_until(lambda: not any(alive(p) for p in tree), 5, "children gone")
    assert shared_memory() <= before
