"""TLS on every hop, with real processes."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import ssl
import subprocess
import threading
import time

import grpc
import pytest

from api import Api, joined
from cluster import BIN, ENV, ROOT, free_port, golden, golden_dir, wait_until

MODEL = "llama_gqa"
LAYOUT = ["--model", golden_dir(MODEL), "-tp", 2, "-dcp", 2, "--dtype=float32", "--metrics-port=-1"]
PROMPT = golden(MODEL)["len33"]
CONFIG_ERROR = 78


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("certificates")
    subprocess.run([ROOT / "tests/data/make_certificates.sh", path], check=True, capture_output=True)
    return path


@pytest.fixture
def pem(made, tmp_path):
    """A copy, for tests that change files."""
    return pathlib.Path(shutil.copytree(made, tmp_path / "pem"))


def tls(pem, name=None, ca=None, prefix="--"):
    return ([f"{prefix}ssl-certfile={pem / name}.pem", f"{prefix}ssl-keyfile={pem / name}.key"] if name else []) + \
        ([f"{prefix}ssl-ca-certs={pem / ca}.pem"] if ca else [])


def replace(pem, to, source):
    for end in (".pem", ".key"):
        if (pem / (source + end)).exists():
            shutil.copy(pem / (source + end), pem / "new")
            os.rename(pem / "new", pem / (to + end))


def weft(*arguments, env=None, timeout=30):
    return subprocess.run([BIN / "weft", *map(str, arguments)], env={**ENV, **(env or {})}, capture_output=True,
                          text=True, timeout=timeout)


class Processes:
    """Programs of Weft, each by itself. Ended with the test."""

    def __init__(self):
        self.running = []
        self.log = {}

    def start(self, program, *flags):
        process = subprocess.Popen([BIN / program, *map(str, flags)], env=ENV, stderr=subprocess.PIPE, text=True)
        lines = self.log[process] = []
        thread = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
        thread.start()
        self.running.append((process, thread))
        return process

    def text(self, process):
        return "".join(self.log[process])

    def wait_for(self, process, pattern, timeout=30):
        def found():
            assert process.poll() is None or re.search(pattern, self.text(process)), self.text(process)
            return re.search(pattern, self.text(process))
        return wait_until(found, timeout, pattern)

    def ends(self, process, timeout=30):
        code = process.wait(timeout)
        next(thread for p, thread in self.running if p is process).join(timeout)
        return code, self.text(process)

    def stop(self):
        for process, _ in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process, thread in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            thread.join()


@pytest.fixture
def processes():
    started = Processes()
    yield started
    started.stop()


class Group:
    """A leader and a follower that join over TCP, and a router, with flags for each."""

    def __init__(self, processes, leader=(), follower=(), router=()):
        self.leader_address = f"127.0.0.1:{free_port()}"
        self.leader = processes.start("weft-worker", *LAYOUT, "--rank=0", f"--listen={self.leader_address}", *leader)
        self.follower = processes.start("weft-worker", *LAYOUT, "--rank=1",
                                        f"--leader-address={self.leader_address}", *follower)
        self.router = processes.start("weft-router", "--model", golden_dir(MODEL), "--port=0", "--metrics-port=-1",
                                      f"--groups={self.leader_address}", *router)
        self.address = processes.wait_for(self.router, r"listening on (\S+)").group(1)

    def wait_ready(self, *flags, env=None):
        def ready():
            out = weft("status", f"--address={self.address}", "--format=json", *flags, env=env)
            return out.returncode == 0 and json.loads(out.stdout)["groups"][0]["ready"]
        wait_until(ready, 30, "ready")

    def generate(self, *flags, env=None, max_tokens=48):
        out = weft("generate", f"--address={self.address}", "--format=json", "--temperature=0", "--ignore-eos",
                   f"--max-tokens={max_tokens}", "--prompt-token-ids=" + ",".join(map(str, PROMPT["ids"])), *flags,
                   env=env)
        return json.loads(out.stdout) if out.stdout else out.stderr


def mutual(processes, pem, ca="ca"):
    """Every hop wants certificates of both its ends."""
    return Group(processes, leader=tls(pem, "server", ca), follower=tls(pem, "client", ca),
                 router=[*tls(pem, "server", ca), *tls(pem, "client", ca, "--worker-")])


def test_mutual_tls_on_every_hop(processes, pem):
    group = mutual(processes, pem)
    good = tls(pem, "client", "ca")
    group.wait_ready(*good)
    assert group.generate(*good)["token_ids"] == PROMPT["greedy"]
    for address in (group.address, group.leader_address):
        for bad in ([], tls(pem, ca="ca"), tls(pem, "foreign", "ca"), tls(pem, "expired", "ca"),
                    tls(pem, "client", "other-ca")):
            out = weft("status", f"--address={address}", *bad)
            assert out.returncode == 1 and len(out.stderr.splitlines()) >= 1, (bad, out)
    # A client that nobody here wrote.
    read = lambda name: (pem / name).read_bytes()
    api = Api(group.address, credentials=grpc.ssl_channel_credentials(
        read("ca.pem"), read("client.key"), read("client.pem")))
    assert joined(api.generate(token_ids={"ids": PROMPT["ids"]},
                               sampling={"temperature": 0, "ignore_eos": True, "max_tokens": 48}))[0] == PROMPT["greedy"]
    api.close()
    for process in (group.leader, group.follower, group.router):
        assert process.poll() is None


def test_a_rank_without_the_right_certificate_does_not_join(processes, pem):
    address = f"127.0.0.1:{free_port()}"
    leader = processes.start("weft-worker", *LAYOUT, "--rank=0", f"--listen={address}", *tls(pem, "server", "ca"))
    for flags in ([], tls(pem, "foreign", "ca"), tls(pem, "client", "other-ca")):
        rank = processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={address}",
                               "--join-timeout=2s", *flags)
        code, text = processes.ends(rank)
        assert code != 0 and f"no leader at {address}" in text, text
    rank = processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={address}",
                           *tls(pem, "client", "ca"))
    processes.wait_for(leader, "ready")
    assert rank.poll() is None


def test_certificates_change_under_load(processes, pem):
    group = mutual(processes, pem)
    good = tls(pem, "client", "ca")
    group.wait_ready(*good)
    stop = threading.Event()

    def stream():
        count = 0
        while not stop.is_set():
            answer = group.generate(*good)
            assert answer.get("token_ids") == PROMPT["greedy"], answer
            count += 1
        return count

    def shown(address):
        """What a new connection sees, by openssl's own client."""
        out = subprocess.run(["openssl", "s_client", "-connect", address, "-cert", pem / "client.pem", "-key",
                              pem / "client.key"], input="", capture_output=True, text=True, timeout=20)
        return re.search(r"subject=CN = (\S+)", out.stdout).group(1)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream) for _ in range(2)]
        try:
            for address in (group.address, group.leader_address):
                assert shown(address) == "server"
            replace(pem, "server", "server2")
            for address in (group.address, group.leader_address):
                assert shown(address) == "server2"
            # From now on only the other CA counts: whoever connects anew needs a certificate of it.
            before = grpc.ssl_channel_credentials(*((pem / n).read_bytes() for n in ("ca.pem", "client.key", "client.pem")))
            stop.set()
            assert all(s.result() > 0 for s in streams)
        finally:
            stop.set()
    open_before = Api(group.address, credentials=before)
    for to, source in (("server", "foreign"), ("client", "foreign"), ("ca", "other-ca")):
        replace(pem, to, source)
    assert group.generate(*good)["token_ids"] == PROMPT["greedy"], "with the new CA"
    assert joined(open_before.generate(token_ids={"ids": PROMPT["ids"]}, sampling={
        "temperature": 0, "ignore_eos": True, "max_tokens": 48}))[0] == PROMPT["greedy"], "an open connection stays"
    open_before.close()
    with pytest.raises(grpc.RpcError):
        Api(group.address, options=[("grpc.use_local_subchannel_pool", 1)], credentials=before)
    # The router's back side connects anew with what the files hold now.
    os.kill(group.leader.pid, signal.SIGKILL)
    assert processes.ends(group.follower)[0] == 70
    processes.start("weft-worker", *LAYOUT, "--rank=0", f"--listen={group.leader_address}", *tls(pem, "server", "ca"))
    processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={group.leader_address}",
                    *tls(pem, "client", "ca"))
    assert group.generate(*good)["token_ids"] == PROMPT["greedy"]


def test_files_that_cannot_be_used_are_one_clear_line(processes, pem):
    def refused(program, *flags):
        code, text = processes.ends(processes.start(program, *flags))
        lines = [line for line in text.splitlines() if not line.startswith("[")]
        assert code == CONFIG_ERROR and len(lines) == 1, text
        return lines[0]
    router = ["--model", golden_dir(MODEL), "--groups=127.0.0.1:1", "--port=0"]
    missing = f"--ssl-certfile={pem}/none"
    mismatch = [f"--ssl-certfile={pem}/server.pem", f"--ssl-keyfile={pem}/client.key"]
    for program, flags in (("weft-router", router), ("weft-worker", [*LAYOUT, "--rank=0", "--listen=127.0.0.1:0"]),
                           ("weft-worker", [*LAYOUT, "--listen=127.0.0.1:0"])):
        assert "none: No such file" in refused(program, *flags, missing, f"--ssl-keyfile={pem}/server.key")
        assert "is not the key of" in refused(program, *flags, *mismatch)
        assert "needs --ssl-keyfile" in refused(program, *flags, f"--ssl-certfile={pem}/server.pem")
    assert "--worker-ssl-ca-certs" in refused("weft-router", *router, *tls(pem, "client", prefix="--worker-"))
    out = weft("status", f"--ssl-ca-certs={pem}/none")
    assert out.returncode == CONFIG_ERROR and "--ssl-ca-certs" in out.stderr
    out = weft("generate", "--model=x", f"--ssl-ca-certs={pem}/ca.pem", "--prompt=x")
    assert out.returncode == CONFIG_ERROR and "is for a server at --address" in out.stderr
