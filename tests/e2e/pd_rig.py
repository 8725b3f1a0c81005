"""A prefill and a decode group of two ranks each behind routers, every one a process of its own, with a link so slow
that a hand-off takes seconds: what happens in each of its phases can be chosen."""

import json
import os
import pathlib
import queue
import random
import re
import signal
import tempfile
import threading
import time
import urllib.request

import grpc

from api import Api
from chaos import Process
from cluster import children, command_line, free_port, golden, golden_dir, leaked_shared_memory, wait_until

MODEL = "llama_gqa"
PROMPTS = golden(MODEL)
LONG, SHORT = PROMPTS["len130"], PROMPTS["len33"]
SEED = int(os.environ.get("WEFT_PD_SEED", "20261129"))
LEASE_SECONDS = 2
BLOCK = 16
# 512 bytes a token, half of them from each prefill rank: the long prompt takes longer than a lease.
BYTES_PER_SECOND = 12000
# Odd seeds send everything over UCX; with the others ranks read KV in each other's memory.
SHARED_MEMORY = SEED % 2 == 0
COMMON = ["-tp", 2, "-dcp", 2, "--dtype=float32", "--kv-cache-dtype=float32", f"--block-size={BLOCK}",
          "--max-model-len=192", "--num-gpu-blocks-override=40", "--threads-per-rank=1", "--no-enable-prefix-caching",
          "--stall-timeout=20s", f"--kv-transfer-lease={LEASE_SECONDS}s"]


def config(role, **more):
    return "--kv-transfer-config=" + json.dumps({"kv_role": role, **more})


PREFILL = [config("kv_producer", kv_buffer_size=8192, shared_memory=SHARED_MEMORY), f"--kv-transfer-bandwidth-limit={BYTES_PER_SECOND}",
           "--cp-kv-cache-interleave-size=1", "--max-num-batched-tokens=32"]
DECODE = [config("kv_consumer"), "--cp-kv-cache-interleave-size=4"]


def quiet(condition):
    """Its value; False while somebody does not answer, as one does that is being started."""
    try:
        return condition()
    except (grpc.RpcError, OSError):
        return False


def some(cases, count):
    """All with WEFT_PD_ALL, else a few drawn by the seed."""
    cases = list(cases)
    return cases if "WEFT_PD_ALL" in os.environ else random.Random(SEED).sample(cases, count)


def draw(*what):
    """A generator for one test; its seed is printed."""
    seed = "-".join(map(str, (SEED, *what)))
    print("seed", seed)
    return random.Random(seed)


class Stream:
    """A streaming call, read by a thread."""

    def __init__(self, call):
        self.call, self.messages, self.ids, self.error = call, [], [], None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            for message in self.call:
                self.messages.append(message)
                self.ids += message.token_ids
        except grpc.RpcError as error:
            self.error = error

    def wait(self, condition, what, timeout=30):
        """Until condition(self), or the stream has ended."""
        wait_until(lambda: condition(self) or not self.thread.is_alive(), timeout, what)

    def wait_tokens(self, count):
        self.wait(lambda s: len(s.ids) >= count, f"{count} tokens")

    def end(self, timeout=60):
        """The tokens; the error's code if it is one."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), f"hangs, with {len(self.ids)} tokens"
        return self.error.code() if self.error else self.ids

    def cancel(self):
        self.call.cancel()
        self.thread.join(10)


class CallError(grpc.RpcError):
    """How a call on a leader's stream has ended."""

    def __init__(self, end):
        super().__init__()
        self._end = end

    def code(self):
        return next(code for code in grpc.StatusCode if code.value[0] == self._end.code)

    def details(self):
        return self._end.message.decode(errors="replace")

    def trailing_metadata(self):
        return (("grpc-status-details-bin", self._end.details),)


class LeaderCall:
    """A request, on a Worker.Generate stream of its own. Iterate over what is said of it."""

    def __init__(self, leader, fields):
        command = leader.message_class("weft.v1.GenerateCommand")
        events = leader.message_class("weft.v1.GenerateEvents")
        self.commands = queue.SimpleQueue()  # its end would end the stream
        self.commands.put(command(call=1, start=fields))
        open_stream = leader.channel.stream_stream("/weft.v1.Worker/Generate", request_serializer=command.SerializeToString,
                                                   response_deserializer=events.FromString)
        self.stream = open_stream(iter(self.commands.get, None), timeout=60)

    def __iter__(self):
        try:
            for message in self.stream:
                for event in message.events:
                    if event.HasField("response"):
                        yield event.response
                    if event.HasField("end"):
                        if event.end.code:
                            raise CallError(event.end)
                        return
        finally:
            self.cancel()

    def cancel(self):
        self.commands.put(None)
        self.stream.cancel()


class Leader(Api):
    """The internal service of a group's leader: what a router does, step by step."""

    def __init__(self, address):
        super().__init__(address, service="weft.v1.Worker")
        self.attempt = 0

    def endpoint(self):
        """Where the group takes KV: the fields of a KvEndpoint."""
        call = self.call("WatchState", {})
        kv = next(call).kv
        call.cancel()
        return {field.name: list(value) if field.name == "fabric_addresses" else value for field, value in kv.ListFields()}

    def generate(self, request_id, prompt, **more):
        self.attempt += 1
        fields = {"request_id": request_id, "prompt_token_ids": prompt["ids"], "attempt": self.attempt,
                  "sampling": {"temperature": 0, "seed": 1, "ignore_eos": True, "max_tokens": len(prompt["greedy"])}}
        return Stream(LeaderCall(self, fields | more))

    def receive(self, request_id, prompt, kv_format):
        """Its stream, and what it says it has reserved."""
        stream = self.generate(request_id, prompt, kv_receive=kv_format)
        stream.attempt = self.attempt
        return stream

    def continue_kv(self, request_id, attempt, first_token=None, failure=""):
        fields = {"request_id": request_id, "attempt": attempt, "failure": failure}
        self.call("ContinueKv", fields | ({} if first_token is None else {"first_token": first_token}))


def reserved(stream):
    """The transfer that a stream of Leader.receive() has reserved."""
    stream.wait(lambda s: any(m.HasField("kv_reserved") for m in s.messages), "blocks are reserved")
    return next(m.kv_reserved for m in stream.messages if m.HasField("kv_reserved"))


def kv_failure(stream):
    return "".join(m.kv_failure for m in stream.messages)


class Rig:
    """Use as a context manager. `prefill`, `decode`, `router` are more flags."""

    def __init__(self, prefill=(), decode=(), router=(), num_routers=1):
        self.folder = tempfile.TemporaryDirectory()
        log = lambda name: pathlib.Path(self.folder.name, name + ".log")
        ports = [free_port() for _ in range(2 + num_routers)]
        self.addresses = {"kv_producer": f"127.0.0.1:{ports[0]}", "kv_consumer": f"127.0.0.1:{ports[1]}"}
        model = f"--model={golden_dir(MODEL)}"
        self.groups = {
            role: Process(role, log(role), "weft-worker", model, f"--listen={self.addresses[role]}", *COMMON, *flags)
            for role, flags in (("kv_producer", [*PREFILL, *prefill]), ("kv_consumer", [*DECODE, *decode]))}
        self.routers = [Process(f"router{i}", log(f"router{i}"), "weft-router", model, f"--port={port}",
                                "--groups=" + ",".join(self.addresses.values()), "--pd-min-prefill-tokens=1",
                                "--metrics-port=0", *router) for i, port in enumerate(ports[2:])]
        self.router_addresses = [f"127.0.0.1:{port}" for port in ports[2:]]
        self.apis = []

    def __enter__(self):
        try:
            self.apis = [wait_until(lambda: quiet(lambda: Api(a)), 30, "a router") for a in self.router_addresses]
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        print(self.logs())
        for api in self.apis:
            api.close()
        self.codes = {p.name: p.stop() for p in [*self.routers, *self.groups.values()]}
        self.folder.cleanup()

    def logs(self):
        return "".join(f"--- {path.name}\n" + "".join(path.read_text(errors="replace").splitlines(True)[-40:])
                       for path in sorted(pathlib.Path(self.folder.name).iterdir()))

    def log_of(self, name):
        return pathlib.Path(self.folder.name, name + ".log").read_text(errors="replace")

    def leader(self, role):
        return Leader(self.addresses[role])

    def start(self, prompt=LONG, router=0, **more):
        fields = {"token_ids": {"ids": prompt["ids"]},
                  "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": len(prompt["greedy"])}}
        return Stream(self.apis[router].call("Generate", fields | more))

    def info(self):
        """What the last router knows: no test harms that one."""
        return self.apis[-1].call("GetServerInfo")

    def ranks(self, role):
        """{rank: pid}."""
        found = {}
        for pid in children(self.groups[role].process.pid):
            if match := re.search(r"--rank=(\d+)", command_line(pid)):
                found[int(match.group(1))] = pid
        return found

    def metric(self, name, ranks=True, **labels):
        """The sum over the routers, and the ranks, of the series with these labels."""
        infos, total = [api.call("GetServerInfo") for api in self.apis], 0
        addresses = [info.metrics_address for info in infos]
        if ranks:
            addresses += [r.metrics_address for g in infos[-1].groups for r in g.ranks]
        for address in addresses:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                        total += float(line.rpartition(" ")[2])
        return total

    def handoffs(self, outcome):
        return self.metric("weft_router_handoffs_total", ranks=False, outcome=outcome)

    def wait_ready(self, timeout=60):
        wait_until(lambda: quiet(lambda: all(g.ready for g in self.info().groups)), timeout, "both groups are ready")

    def wait_whole(self, timeout=30):
        """Nothing is left of any request, in any group."""
        for process in [*self.groups.values(), *self.routers]:
            process.keep_running()

        def whole():
            return all(g.ready and g.num_free_blocks == g.num_blocks and not g.num_requests_running and
                       not g.num_requests_waiting for g in self.info().groups)
        wait_until(lambda: quiet(whole), timeout, "every block of both groups is free")
        wait_until(lambda: quiet(lambda: self.metric("weft_kv_transfer_inflight") == 0), 10, "no transfer is open")


class Harm:
    """kill -9, or SIGSTOP and SIGCONT after `pause` seconds."""

    def __init__(self, rig, role, rank):
        self.pid = rig.ranks(role)[rank]

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def pause(self, seconds, meanwhile=lambda: None):
        os.kill(self.pid, signal.SIGSTOP)
        try:
            until = time.monotonic() + seconds
            meanwhile()
            time.sleep(max(0, until - time.monotonic()))
        finally:
            os.kill(self.pid, signal.SIGCONT)


def nothing_leaked(pids):
    assert leaked_shared_memory(set(pids)) == []
