"""Random processes of a cluster are killed, stopped and started again under load, by seed: every stream has to
end with exactly the reference's tokens.

    .venv/bin/python tests/e2e/chaos.py [--seconds 300] [--streams 200] [--seed N]

Three groups of two ranks, two routers, and clients that go on at the other router when theirs is lost, with
`resume`. Prints what happened; exits 1 when more than 0.5 % of the streams fail, one has a wrong token, or blocks
or processes stay behind. Then every process is restarted in turn, as in a rollout: no call may fail.
"""

import argparse
import collections
import concurrent.futures
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import grpc

from api import Api
from cluster import (BIN, ENV, alive, children, command_line, free_port, golden, golden_dir, leaked_shared_memory,
                     wait_until)

MODEL = "llama_mqa"
NUM_GROUPS, NUM_ROUTERS = 3, 2
GROUP_FLAGS = ["-tp", 2, "-dcp", 2, "--dtype=float32", "--kv-cache-memory-bytes=2MiB", "--threads-per-rank=1",
               "--metrics-port=-1", "--log-level=warn"]
# What kills a whole process does so after this; a liveness probe would.
PROBE_SECONDS = 4
# Of a client, without a message: its router is taken for lost.
SILENCE_SECONDS = 20
MAX_TRIES = 20


class Process:
    """A program that is started again, at the same address, whenever it has ended."""

    def __init__(self, name, log, program, *flags):
        self.name, self.restarts, self.stopping = name, 0, False
        self.command = [BIN / program, *map(str, flags)]
        self.log = open(log, "ab")
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, env=ENV, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def keep_running(self):
        if self.process.poll() is None or self.stopping:
            return
        self.restarts += 1
        self.start()

    def restart(self):
        """As an operator does: asks it to end, and waits for it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.name
        self.start()

    def victims(self):
        return [self.process.pid, *children(self.process.pid)]

    def stop(self):
        self.stopping = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.log.close()
        return code


class Monkey:
    """Harms one process at a time, so that the rest of the cluster can serve."""

    def __init__(self, draw, processes):
        self.draw, self.processes = draw, processes
        self.done, self.counts = threading.Event(), collections.Counter()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.done.wait(self.draw.uniform(0.3, 1.5)):
            target = self.draw.choice(self.processes)
            pid = self.draw.choice(target.victims())
            kind = "rank" if "--rank=" in command_line(pid) else target.name.rstrip("0123456789")
            sig = self.draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                continue
            self.counts[f"{kind} {sig.name[3:]}"] += 1
            if sig == signal.SIGSTOP and pid == target.process.pid:
                self.done.wait(PROBE_SECONDS)
                os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.keep_running()

    def stop(self):
        self.done.set()
        self.thread.join()


def run_stream(apis, draw, prompt, num_tokens, index):
    """(ids of the whole stream, tries, error) of one request, over as many routers as it takes."""
    ids, seq, error = [], 0, None
    for attempt in range(MAX_TRIES):
        request = {"request_id": f"stream-{index}", "token_ids": {"ids": prompt["ids"]},
                   "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}}
        if seq:
            request |= {"resume": {"ids": ids}, "resume_seq": seq}
        call = apis[(index + attempt) % len(apis)].call("Generate", request)
        watchdog = None
        try:
            while True:
                watchdog = threading.Timer(SILENCE_SECONDS, call.cancel)
                watchdog.start()
                message = next(call)
                watchdog.cancel()
                assert message.seq == seq, f"message {message.seq} follows {seq - 1}"
                seq += 1
                ids += message.token_ids
                assert message.usage.completion_tokens == len(ids)
                if message.finish_reason:
                    return ids, attempt + 1, None
        except StopIteration:
            error = "ended without a finish reason"
        except grpc.RpcError as caught:
            error = f"{caught.code().name}: {caught.details()}"
        finally:
            watchdog.cancel()
            call.cancel()
        time.sleep(draw.uniform(0.1, 0.5))
    return ids, MAX_TRIES, error


class Deployment:
    """Three groups of two ranks behind two routers, each a process of its own. Use as a context manager."""

    def __init__(self, *router_flags):
        self.folder = tempfile.TemporaryDirectory()
        log = lambda name: pathlib.Path(self.folder.name, name + ".log")
        ports = [free_port() for _ in range(NUM_GROUPS + NUM_ROUTERS)]
        self.groups = [Process(f"supervisor{i}", log(f"group{i}"), "weft-worker", "--model", golden_dir(MODEL),
                               *GROUP_FLAGS, f"--listen=127.0.0.1:{ports[i]}") for i in range(NUM_GROUPS)]
        addresses = ",".join(f"127.0.0.1:{p}" for p in ports[:NUM_GROUPS])
        self.routers = [Process(f"router{i}", log(f"router{i}"), "weft-router", "--model", golden_dir(MODEL),
                                f"--groups={addresses}", f"--port={ports[NUM_GROUPS + i]}", "--metrics-port=-1",
                                "--log-level=warn", *router_flags) for i in range(NUM_ROUTERS)]
        self.processes = self.groups + self.routers
        self.ports, self.apis = ports[NUM_GROUPS:], []

    def __enter__(self):
        quick = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        try:
            for port in self.ports:
                self.apis.append(wait_until(lambda: quiet(lambda: Api(f"127.0.0.1:{port}", quick)), 30, "a router"))
            self.wait_ready()
        except BaseException:
            print(self.logs())
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        self.folder.cleanup()

    def whole(self, router=0):
        """Whether all groups are ready and all their blocks free. Starts what has ended."""
        for process in self.processes:
            process.keep_running()
        groups = self.apis[router].call("GetServerInfo").groups
        return all(g.ready and g.num_free_blocks == g.num_blocks and not g.num_requests_running for g in groups)

    def wait_ready(self):
        for api in self.apis:
            wait_until(lambda: quiet(lambda: all(g.ready for g in api.call("GetServerInfo").groups)), 60, "all ready")

    def wait_whole(self):
        for router in range(NUM_ROUTERS):
            wait_until(lambda: quiet(lambda: self.whole(router)), 60, "all groups are ready and their blocks free")

    def stop(self):
        """What is left behind, in words. Once is enough."""
        for api in self.apis:
            api.close()
        self.apis = []
        pids = [pid for p in self.processes for pid in p.victims()]
        codes = {p.name: p.stop() for p in self.routers + self.groups}
        self.processes, self.routers, self.groups = [], [], []
        return ([f"{name} ended with {code}" for name, code in codes.items() if code != 0] +
                [f"process {pid} is left" for pid in pids if alive(pid)] + leaked_shared_memory(pids))

    def logs(self):
        return "".join(f"--- {path.name}\n" + "".join(path.read_text(errors="replace").splitlines(True)[-30:])
                       for path in sorted(pathlib.Path(self.folder.name).iterdir()))


def quiet(condition):
    try:
        return condition()
    except grpc.RpcError:
        return False


def draw_request(draw):
    """(prompt, its reference's tokens)."""
    prompt = draw.choice(list(golden(MODEL).values()))
    return prompt, prompt["greedy"][:draw.randint(1, len(prompt["greedy"]))]


def run_clients(num_clients, client):
    """Calls client() in so many threads; returns when all have."""
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        for done in [pool.submit(client) for _ in range(num_clients)]:
            done.result()


def run(seconds, num_streams, seed, print=print):
    """What is wrong, in words; nothing when all is well."""
    print(f"seed {seed}")
    faults, outcomes, lock, numbers = [], collections.Counter(), threading.Lock(), itertools.count()
    # Groups die far more often here than a request may lose by default.
    with Deployment("--max-replays=20") as deployment:
        monkey = Monkey(random.Random(seed), deployment.processes)
        until = time.monotonic() + seconds

        def client():
            while time.monotonic() < until:
                index = next(numbers)
                draw = random.Random(seed + index)
                prompt, expected = draw_request(draw)
                ids, tries, error = run_stream(deployment.apis, draw, prompt, len(expected), index)
                with lock:
                    outcomes["resumed at another router"] += tries > 1
                    right = expected[:len(ids)] == ids if error else ids == expected
                    outcomes["wrong" if not right else "failed" if error else "complete"] += 1
                    if error or not right:
                        faults.append(f"stream {index}: {error or 'wrong tokens'}")
        try:
            run_clients(num_streams, client)
        finally:
            monkey.stop()
        assert seconds < 20 or len(monkey.counts) > 3, monkey.counts
        print("harm: " + ", ".join(f"{n} {what}" for what, n in sorted(monkey.counts.items())))
        print("streams: " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
        total = outcomes["complete"] + outcomes["failed"] + outcomes["wrong"]
        share = outcomes["complete"] / max(1, total)
        print(f"{share:.2%} of {total} streams complete")
        if share >= 0.995 and not outcomes["wrong"]:
            faults.clear()
        deployment.wait_whole()
        faults = faults[:10] + deployment.stop()
        if faults:
            print(deployment.logs())
    return faults


def rolling_restart(num_streams, print=print):
    """Every group and every router is asked to end and started again under load. A client goes to the other
    router when its own takes no call, as a load balancer would; no call that has begun may fail."""
    faults, outcomes, lock, over = [], collections.Counter(), threading.Lock(), threading.Event()
    with Deployment() as deployment:
        def client():
            draw = random.Random(threading.get_ident())
            while not over.is_set():
                prompt, expected = draw_request(draw)
                request = {"token_ids": {"ids": prompt["ids"]},
                           "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": len(expected)}}
                messages, error = [], None
                for api in draw.sample(deployment.apis, NUM_ROUTERS):
                    try:
                        for message in api.call("Generate", request):
                            messages.append(message)
                        error = None
                    except grpc.RpcError as caught:
                        error = caught
                    if messages or error is None or error.code() != grpc.StatusCode.UNAVAILABLE:
                        break
                right = [i for m in messages for i in m.token_ids] == expected
                with lock:
                    outcomes["right" if right and error is None else "failed"] += 1
                    if error is not None or not right:
                        faults.append(f"{error.code().name}: {error.details()}" if error else "wrong tokens")

        def restart_all():
            try:
                for process in deployment.processes:
                    process.restart()
                    deployment.wait_ready()
            finally:
                over.set()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            rolling = pool.submit(restart_all)
            run_clients(num_streams, client)
            rolling.result()
        assert outcomes["right"] > 0
        print("calls: " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
        deployment.wait_whole()
        faults = faults[:10] + deployment.stop()
        if faults:
            print(deployment.logs())
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    faults = run(args.seconds, args.streams, args.seed) + rolling_restart(args.streams)
    print("\n".join(faults) if faults else "nothing is wrong")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
