"""Who connects to any port of any process and does not speak as it should: nobody else notices."""

import os
import pathlib
import random
import re
import resource
import socket
import struct

import pytest

from api import Api, joined
from cluster import children, command_line, free_port, golden, golden_dir, wait_until
from pd_rig import config, quiet
from test_security import Processes

MODEL = "llama_gqa"
PROMPT = golden(MODEL)["len33"]
FLAGS = [f"--model={golden_dir(MODEL)}", "-tp", 2, "-dcp", 2, "--dtype=float32", "--threads-per-rank=1",
         "--metrics-port=0", "--log-level=warn", config("kv_both")]
SEED = 20261130


def listening_ports(pid):
    """TCP ports that a process listens on, on any address of this host."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        target = os.readlink(entry.path)
        if target.startswith("socket:"):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def connected(port):
    """A socket; None when the connection was refused or reset."""
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=5)
    except OSError:
        return None


def num_descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid):
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Serving:
    """A supervised group of two ranks and a router, each with ports of its own."""

    def __init__(self, processes):
        self.leader_port, self.router_port = free_port(), free_port()
        leader = f"127.0.0.1:{self.leader_port}"
        self.worker = processes.start("weft-worker", *FLAGS, f"--listen={leader}")
        self.router = processes.start("weft-router", f"--model={golden_dir(MODEL)}", f"--groups={leader}",
                                      "--host=127.0.0.1", f"--port={self.router_port}", "--metrics-port=0",
                                      "--log-level=warn")
        self.api = wait_until(lambda: quiet(lambda: Api(f"127.0.0.1:{self.router_port}")), 30, "the router")
        wait_until(lambda: quiet(lambda: self.group().ready), 60, "the group is ready")

    def pids(self):
        ranks = {re.search(r"--rank=(\d+)", command_line(pid)).group(1): pid for pid in children(self.worker.pid)}
        return {"router": self.router.pid} | {f"rank{rank}": pid for rank, pid in ranks.items()}

    def group(self):
        return self.api.call("GetServerInfo").groups[0]

    def check_good(self, api=None):
        messages = (api or self.api).generate(token_ids={"ids": PROMPT["ids"]}, sampling={
            "temperature": 0, "ignore_eos": True, "max_tokens": len(PROMPT["greedy"])})
        assert joined(messages)[0] == PROMPT["greedy"]


@pytest.fixture
def serving():
    processes = Processes()
    try:
        yield Serving(processes)
    finally:
        processes.stop()
        for lines in processes.log.values():
            print("--- ", *lines[-40:], sep="")


# --- What a stranger sends.

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
POST = b"\x83\x86\x44\x01/\x41\x01h"  # :method POST, :scheme http, :path /, :authority h


def frame(kind, payload=b"", flags=0, stream=0, length=None):
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def http2(*frames):
    return PREFACE + frame(SETTINGS) + b"".join(frames)


def what_is_sent(draw):
    noise = draw.randbytes(1 << 16)
    return {
        "nothing": b"",
        "noise": noise,
        "half a preface": PREFACE[:10],
        "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise[:507],
        "a header that never ends": b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (1 << 20),
        "an HTTP body that lies": b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
        "hundreds of requests of which no answer is read": b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n" * 300,
        "a frame longer than allowed": http2(frame(DATA, noise, stream=1, length=(1 << 24) - 1)),
        "noise as a header block": http2(frame(HEADERS, noise[:1000], flags=4, stream=1)),
        "a continuation of nothing": http2(frame(CONTINUATION, POST, stream=1)),
        "a header block without an end": http2(frame(HEADERS, POST, stream=1), *[frame(CONTINUATION, noise[:9000], stream=1)] * 100),
        "streams that are reset at once": http2(*[frame(HEADERS, POST, flags=4, stream=i) + frame(RST_STREAM, b"\0\0\0\x08", stream=i)
                                                  for i in range(1, 4001, 2)]),
        "pings": http2(*[frame(PING, b"12345678")] * 5000),
        "settings": http2(*[frame(SETTINGS)] * 5000),
        "windows that overflow": http2(*[frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff")] * 3),
        "a length that lies before a message": http2(frame(HEADERS, POST, flags=4, stream=1),
                                                     frame(DATA, b"\0\xff\xff\xff\xff" + noise[:100], stream=1)),
        "small numbers": struct.pack("<8Q", 1, 0, 1 << 63, 5, 0xffffffff, 0, 7, 1) * 100,
    }


class Stranger:
    """A connection that sends its bytes, in one go or byte by byte, and reads nothing."""

    def __init__(self, port, data, slowly):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.socket.setblocking(False)
        self.left, self.slowly = memoryview(data), slowly

    def turn(self):
        try:
            sent = self.socket.send(self.left[:1] if self.slowly else self.left)
            self.left = self.left[sent:]
        except BlockingIOError:
            pass
        except OSError:  # it was shown the door
            self.left = memoryview(b"")

    def close(self):
        self.socket.close()


def test_strangers_on_every_port_disturb_nobody(serving):
    draw = random.Random(SEED)
    pids = serving.pids()
    ports = {name: listening_ports(pid) for name, pid in pids.items()}
    # Of each the metrics' port, and gRPC's or UCX's.
    assert serving.leader_port in ports["rank0"] and serving.router_port in ports["router"]
    assert all(len(found) >= 2 for found in ports.values()), ports
    serving.check_good()
    before = {name: (num_descriptors(pid), resident_bytes(pid)) for name, pid in pids.items()}

    for what, data in what_is_sent(draw).items():
        strangers = [Stranger(port, data, slowly) for found in ports.values() for port in found
                     for slowly in (False, False, True)]
        for _ in range(3):
            for stranger in strangers:
                stranger.turn()
        serving.check_good()
        for stranger in strangers:
            stranger.close()
        serving.check_good()
        assert serving.group().ready, what
        assert serving.pids() == pids, what

    for name, pid in pids.items():
        wait_until(lambda: num_descriptors(pid) <= before[name][0] + 8, 30, f"{name} closes what strangers left")
        assert resident_bytes(pid) < before[name][1] + (128 << 20), name


@pytest.mark.parametrize("who", ["router", "rank0", "rank1"])
def test_a_process_without_descriptors_left_costs_no_request(serving, who):
    """A router serves whom it has. A rank may need one for its peers' memory: then its group starts again."""
    pid = serving.pids()[who]
    serving.check_good()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_descriptors(pid) + 2, 1 << 10))
    waiting = [opened for port in listening_ports(pid) for _ in range(20) if (opened := connected(port))]
    assert len(waiting) >= 10
    for _ in range(5):
        serving.check_good()
    for opened in waiting:
        opened.close()
    late = wait_until(lambda: quiet(lambda: Api(f"127.0.0.1:{serving.router_port}")), 30, "a new client is served")
    serving.check_good(late)
    late.close()
    assert serving.router.poll() is None and serving.worker.poll() is None
