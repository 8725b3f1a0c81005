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
        lines = [line for line in text.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]  # the log
        assert code == CONFIG_ERROR and len(lines) == 1, text
        return lines[0]
    router = ["--model", golden_dir(MODEL), "--groups=127.0.0.1:1", "--port=0", "--metrics-port=-1"]
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


# --- Tenants.

def write_keys(path, tenants):
    (path.parent / "new").write_text(json.dumps({"tenants": tenants}))
    os.rename(path.parent / "new", path)


A, B = {"name": "a", "api_keys": ["key-of-a"]}, {"name": "b", "api_keys": ["key-of-b"]}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    write_keys(path, [A, B])
    return path


def error_of(answer):
    return answer["error"]["code"], answer["error"]["reason"]


def api_of(group, key):
    return Api(group.address, metadata=[("authorization", f"Bearer {key}")])


def greedy(max_tokens=48):
    return {"token_ids": {"ids": PROMPT["ids"]},
            "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}}


def test_keys_open_the_router_and_are_said_nowhere(processes, keys, tmp_path):
    group = Group(processes, router=[f"--api-keys-file={keys}"])
    group.wait_ready(env={"WEFT_API_KEY": "key-of-a"})
    (tmp_path / "key").write_text("key-of-b\n")
    assert group.generate(f"--api-key-file={tmp_path}/key")["token_ids"] == PROMPT["greedy"]
    assert error_of(group.generate())[0] == "UNAUTHENTICATED"
    wrong = group.generate(env={"WEFT_API_KEY": "key-of-nobody"})
    assert error_of(wrong)[0] == "UNAUTHENTICATED" and "key-of" not in wrong["error"]["message"]
    out = weft("status", f"--address={group.address}")
    assert out.returncode == 1 and "no API key" in out.stderr
    stranger = Api(group.address)
    assert stranger.serving(), "health and reflection need no key"
    stranger.close()

    # New keys count within a second or so; a broken file changes nothing.
    write_keys(keys, [{"name": "a", "api_keys": ["key-of-a-2"]}, B])
    new = {"WEFT_API_KEY": "key-of-a-2"}
    wait_until(lambda: "token_ids" in group.generate(env=new, max_tokens=1), 10, "the new key")
    assert error_of(group.generate(env={"WEFT_API_KEY": "key-of-a"}))[0] == "UNAUTHENTICATED"
    keys.write_text('{"tenants": [{"name": "key-of-x')
    processes.wait_for(group.router, "the tenants stay as they are")
    assert "token_ids" in group.generate(env=new, max_tokens=1)
    log = "".join(processes.text(p) for p, _ in processes.running)
    shown = subprocess.run([BIN / "weft-router", f"--api-keys-file={keys}", "--print-config"], capture_output=True,
                           text=True).stdout
    assert "key-of" not in log + shown
    code, text = processes.ends(processes.start("weft-router", "--groups=127.0.0.1:1", f"--api-keys-file={keys}"))
    assert code == CONFIG_ERROR and "no JSON object" in text and "key-of" not in text


def test_tenants_do_not_meet(processes, keys):
    """Neither by request id, nor by Abort, nor in the prefix cache."""
    group = Group(processes, router=[f"--api-keys-file={keys}"])
    group.wait_ready(env={"WEFT_API_KEY": "key-of-a"})
    a, b = api_of(group, "key-of-a"), api_of(group, "key-of-b")
    prompt = golden(MODEL)["len130"]["ids"]
    def cached(api, salt=""):
        messages = api.generate(token_ids={"ids": prompt}, cache_salt=salt, sampling={"max_tokens": 1})
        return messages[-1].usage.cached_tokens
    assert cached(a) == 0 and cached(a) > 0, "a tenant finds its own prefix"
    assert cached(b) == 0 and cached(b, "a/") == 0, "and nobody else's"
    assert cached(b) > 0

    call = a.call("Generate", {"request_id": "same", **greedy(2000)})
    next(call)
    b.call("Abort", {"request_id": "same"})
    b.call("Abort", {"request_id": "a/same"})
    assert joined(b.generate(request_id="same", **greedy()))[0] == PROMPT["greedy"]
    assert next(call).finish_reason == 0, "it goes on"
    with pytest.raises(grpc.RpcError) as caught:
        a.generate(request_id="same", **greedy())
    assert a.error(caught.value).code == grpc.StatusCode.ALREADY_EXISTS
    a.call("Abort", {"request_id": "same"})
    assert list(call)[-1].finish_reason == 3
    a.close()
    b.close()


def test_limits_are_a_tenants_own(processes, keys):
    write_keys(keys, [{**A, "max_concurrent_requests": 1, "tokens_per_minute": 60, "burst_tokens": 400}, B])
    group = Group(processes, router=[f"--api-keys-file={keys}"])
    group.wait_ready(env={"WEFT_API_KEY": "key-of-a"})
    a, b = api_of(group, "key-of-a"), api_of(group, "key-of-b")

    def refused(api, call=lambda api: api.generate(**greedy())):
        with pytest.raises(grpc.RpcError) as caught:
            call(api)
        error = api.error(caught.value)
        assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_seconds > 0, error
        return error.reason

    call = a.call("Generate", greedy(400))
    next(call)
    assert refused(a) == "CONCURRENCY_LIMIT_EXCEEDED"
    for name, fields in (("Tokenize", {"text": "a"}), ("Detokenize", {"token_ids": [5]})):
        assert refused(a, lambda api: api.call(name, fields)) == "CONCURRENCY_LIMIT_EXCEEDED"
        b.call(name, fields)
    assert joined(b.generate(**greedy()))[0] == PROMPT["greedy"], "the other's are untouched"
    assert list(call)[-1].finish_reason == 2
    # 33 + 400 tokens are more than the burst: the rest is owed.
    assert refused(a) == "RATE_LIMIT_EXCEEDED"
    assert joined(b.generate(**greedy()))[0] == PROMPT["greedy"]
    a.close()
    b.close()


# --- The join.

def test_a_rank_needs_the_secret_of_its_group(processes, tmp_path):
    (tmp_path / "secret").write_text("opensesame\n")
    (tmp_path / "wrong").write_text("guess")
    address = f"127.0.0.1:{free_port()}"
    secret = f"--join-secret-file={tmp_path}/secret"
    leader = processes.start("weft-worker", *LAYOUT, "--rank=0", f"--listen={address}", secret)
    for flags, seen in (([], "this one sent none"), ([f"--join-secret-file={tmp_path}/wrong"], "this one sent another")):
        rank = processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={address}", *flags)
        code, text = processes.ends(rank)
        assert code == CONFIG_ERROR and "--join-secret-file" in text and seen in text, text
    rank = processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={address}", secret)
    processes.wait_for(leader, "ready\n")
    assert rank.poll() is None and "opensesame" not in processes.text(leader)
    # Nor does one disturb a group that runs.
    late = processes.start("weft-worker", *LAYOUT, "--rank=1", f"--leader-address={address}")
    assert processes.ends(late)[0] == CONFIG_ERROR
    time.sleep(0.5)
    assert leader.poll() is None and rank.poll() is None
    code, text = processes.ends(processes.start("weft-worker", *LAYOUT, f"--join-secret-file={tmp_path}/none"))
    assert code == CONFIG_ERROR and "none: No such file" in text


def test_a_supervised_group_joins_with_its_secret(processes, pem, tmp_path):
    (tmp_path / "secret").write_text("opensesame")
    address = f"127.0.0.1:{free_port()}"
    processes.start("weft-worker", *LAYOUT, f"--listen={address}", f"--join-secret-file={tmp_path}/secret",
                    *tls(pem, "server", "ca"))
    router = processes.start("weft-router", "--model", golden_dir(MODEL), "--port=0", "--metrics-port=-1",
                             f"--groups={address}", *tls(pem, "client", "ca", "--worker-"))
    at = processes.wait_for(router, r"listening on (\S+)").group(1)
    wait_until(lambda: weft("generate", f"--address={at}", "--prompt-token-ids=7", "--max-tokens=1").returncode == 0,
               30, "an answer")
