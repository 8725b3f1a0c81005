"""A group over two hosts: two network namespaces, joined by one link, with TCP only."""

import json
import os
import subprocess
import threading
import time

import pytest

from cluster import BIN, ENV, ROOT, golden, golden_dir, wait_until

LEADER, FOLLOWER = "10.213.0.1", "10.213.0.2"
SMOLLM2 = ROOT / "models/smollm2-135m-instruct"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces. What runs in them is started again when it ends, as an init system would."""

    def __init__(self):
        self.names = [f"weft-{os.getpid()}-{i}" for i in (0, 1)]
        self.stopping = False
        self.threads, self.processes, self.log = [], [], []

    def __enter__(self):
        a, b = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth-a", "netns", a, "type", "veth", "peer", "name", "eth-b", "netns", b)
        for name, device, address in ((a, "eth-a", LEADER), (b, "eth-b", FOLLOWER)):
            ip("-n", name, "address", "add", address + "/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        self.stopping = True
        for process in self.processes:
            process.kill()
        for thread in self.threads:
            thread.join()
        for name in self.names:
            ip("netns", "del", name)

    def command(self, host, program, *arguments):
        return ["ip", "netns", "exec", self.names[host], BIN / program, *map(str, arguments)]

    def env(self, host):
        # No shared memory between hosts: they are one machine here.
        return {**ENV, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": ("eth-a", "eth-b")[host]}

    def keep_running(self, host, program, *arguments):
        def run():
            while not self.stopping:
                process = subprocess.Popen(self.command(host, program, *arguments), env=self.env(host),
                                           stderr=subprocess.PIPE, text=True)
                self.processes.append(process)
                if self.stopping:
                    process.kill()
                for line in process.stderr:
                    self.log.append(line)
                process.wait()
                time.sleep(0.2)
        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def set_link(self, state):
        ip("-n", self.names[0], "link", "set", "eth-a", state)

    def start_generate(self, *flags):
        return subprocess.Popen(
            self.command(0, "weft", "generate", f"--address={LEADER}:50051", "--format=json", *flags),
            env=self.env(0), stdout=subprocess.PIPE, text=True)

    def generate(self, *flags):
        return json.loads(self.start_generate(*flags).communicate(timeout=60)[0].splitlines()[0])

    def status(self):
        out = subprocess.run(self.command(0, "weft", "status", f"--address={LEADER}:50051", "--format=json"),
                             env=self.env(0), capture_output=True, text=True)
        return json.loads(out.stdout)["groups"][0] if out.returncode == 0 else None

    def wait_ready(self):
        def ready():
            group = self.status()
            return group if group and group["ready"] else None
        try:
            return wait_until(ready, 60, "ready")
        except AssertionError:
            raise AssertionError("not ready:\n" + "".join(self.log))


@pytest.fixture
def hosts():
    with Hosts() as running:
        yield running


def start_group(hosts, model, *flags):
    flags = ["--model", model, "-tp", 2, "-dcp", 2, *flags]
    hosts.keep_running(0, "weft-worker", *flags, "--rank=0", f"--listen={LEADER}:50052")
    hosts.keep_running(1, "weft-worker", *flags, "--rank=1", f"--leader-address={LEADER}:50052")
    hosts.keep_running(0, "weft-router", "--model", model, f"--groups={LEADER}:50052", f"--listen={LEADER}:50051",
                       "--max-replays=0")
    return hosts.wait_ready()


def test_a_group_over_two_hosts_serves_the_reference_over_tcp(hosts):
    start_group(hosts, golden_dir("llama_mqa"), "--dtype=float32")
    prompt = golden("llama_mqa")["len130"]
    got = hosts.generate("--prompt-token-ids", ",".join(map(str, prompt["ids"])), "--temperature=0",
                         "--ignore-eos", "--max-tokens=48")
    assert got["token_ids"] == prompt["greedy"]

    def counted():
        ranks = hosts.status()["ranks"]
        return len(ranks) == 2 and all(int(r["fabric_sent_bytes"]) > 0 for r in ranks)
    wait_until(counted, 10, "bytes over UCX on both ranks")


def test_a_lost_link_is_as_a_lost_rank(hosts):
    generation = start_group(hosts, SMOLLM2, "--max-model-len=4K", "--kv-cache-memory-bytes=128MiB")["generation"]
    ids = "--prompt-token-ids=7,7"
    stream = hosts.start_generate(ids, "--ignore-eos", "--max-tokens=3000")
    wait_until(lambda: hosts.status()["num_requests_running"], 10, "running")
    hosts.set_link("down")
    struck = time.monotonic()
    error = json.loads(stream.communicate(timeout=20)[0].splitlines()[0])["error"]
    assert (error["code"], error["reason"]) == ("UNAVAILABLE", "RANK_LOST"), error
    assert time.monotonic() - struck < 5.5, "streams end within 5 s"
    hosts.set_link("up")
    assert hosts.wait_ready()["generation"] != generation
    assert len(hosts.generate(ids, "--ignore-eos", "--max-tokens=4")["token_ids"]) == 4
