"""A `weft serve` process tree under test, and what can be seen of it from outside."""

import itertools
import json
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("WEFT_BIN_DIR", ROOT / "build/bin"))
ENV = {**os.environ, "UCX_NET_DEVICES": "lo"}


def golden_dir(name):
    for folder in (ROOT / "tests/data" / name, ROOT / "../shared/goldens" / name):
        if folder.exists():
            return folder
    raise FileNotFoundError(name)


def golden(name):
    return json.loads((golden_dir(name) / "golden.json").read_text())["prompts"]


_draws = itertools.count(37 * os.getpid())


def free_port():
    """Below those that the kernel gives to whoever asks for any, so that it is still free when it is used."""
    lowest, end = 10240, int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert end > lowest + 1000, f"the kernel gives ports from {end} on"
    while True:
        port = lowest + next(_draws) % (end - lowest)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


def children(pid):
    """All descendants of `pid`, by /proc."""
    parent_of = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            parent_of[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        direct = [p for p, pp in parent_of.items() if pp == parent]
        found += direct
        frontier += direct
    return found


def command_line(pid):
    try:
        return pathlib.Path("/proc", str(pid), "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pid):
    try:
        stat = pathlib.Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def leaked_shared_memory(pids, timeout=5):
    """System V segments that one of `pids` made, and files in /dev/shm that name one of them.

    A process that was killed can be a zombie while its other threads still hold its memory: a segment that is
    marked for destruction counts as leaked only if it outlives them, `timeout` seconds long.
    """
    deadline = time.monotonic() + timeout
    while (left := _shared_memory_of(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _shared_memory_of(pids):
    segments = [line.split() for line in pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return ([f"sysv {s[1]}" for s in segments if int(s[4]) in pids] +
            [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)])


def wait_until(condition, timeout, what):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout} s")


class Cluster:
    """`weft serve MODEL FLAGS` on a port of its own. Use as a context manager."""

    def __init__(self, model, *flags, wait=True, timeout=60):
        self.process = subprocess.Popen(
            [BIN / "weft", "serve", str(model), "--host=127.0.0.1", "--port=0", "--metrics-port=0",
             *map(str, flags)], env=ENV, stderr=subprocess.PIPE, text=True)
        self.log = []
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.timeout = timeout
        self.address = self.wait_for_line(r"listening on (\S+)").group(1)
        if wait:
            self.wait_ready()

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for_line(self, pattern):
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                raise AssertionError("weft serve ended:\n" + "".join(self.log))
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line like {pattern}:\n" + "".join(self.log))

    def status(self):
        """The first group of `weft status`, or None while nobody answers."""
        out = subprocess.run([BIN / "weft", "status", "--address", self.address, "--format=json"],
                             env=ENV, capture_output=True, text=True)
        if out.returncode != 0:
            return None
        return json.loads(out.stdout)["groups"][0]

    def wait_ready(self):
        def ready():
            group = self.status()
            return group if group and group["ready"] else None
        return wait_until(ready, self.timeout, "ready")

    def generate(self, *flags, check=True):
        """The JSON lines of `weft generate --address`."""
        out = subprocess.run(
            [BIN / "weft", "generate", "--address", self.address, "--format=json", *map(str, flags)],
            env=ENV, capture_output=True, text=True, timeout=120)
        if check:
            assert out.returncode == 0, out.stderr + out.stdout + "".join(self.log)
        return [json.loads(line) for line in out.stdout.splitlines()]

    def supervisor_pid(self):
        return next(p for p in children(self.process.pid)
                    if "weft-worker" in command_line(p) and "--rank=" not in command_line(p))

    def rank_pids(self):
        pids = {}
        for pid in children(self.process.pid):
            if match := re.search(r"--rank=(\d+)", command_line(pid)):
                pids[int(match.group(1))] = pid
        return pids

    def stop(self, sig=signal.SIGTERM, timeout=40):
        tree = children(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(sig)
        self.process.wait(timeout)
        wait_until(lambda: not any(alive(p) for p in tree), 5, "children gone")
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            try:
                self.stop(timeout=15)
            except (subprocess.TimeoutExpired, AssertionError):
                self.process.kill()
                raise


def generate_offline(model, *flags, timeout=120):
    """`weft generate --model MODEL FLAGS`: (exit code, JSON lines, standard error)."""
    out = subprocess.run([BIN / "weft", "generate", "--model", str(model), "--format=json", *map(str, flags)],
                         env=ENV, capture_output=True, text=True, timeout=timeout)
    return out.returncode, [json.loads(line) for line in out.stdout.splitlines()], out.stderr
