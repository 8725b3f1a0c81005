"""Random processes of a cluster are killed, stopped and started again under load, by seed: every stream has to
end with exactly the reference's tokens.

    .venv/bin/python tests/e2e/chaos.py [--seconds 300] [--streams 200] [--seed N]

Three groups of two ranks, two routers, and clients that go on at the other router when theirs is lost, with
`resume`. Prints what happened; exits 1 when more than 0.5 % of the streams fail, one has a wrong token, or blocks
or processes stay behind.
"""

import argparse
import collections
import concurrent.futures
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
        self.process = subprocess.Popen(self.command, env=ENV, stderr=self.log)

    def keep_running(self):
        if self.process.poll() is None or self.stopping:
            return
        self.restarts += 1
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

    def __init__(self, draw, processes, print):
        self.draw, self.processes, self.print = draw, processes, print
        self.done, self.counts, self.pids = threading.Event(), collections.Counter(), set()
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


def run(seconds, num_streams, seed, print=print):
    """What is wrong, in words; nothing when all is well."""
    draw = random.Random(seed)
    prompts = list(golden(MODEL).values())
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        log = lambda name: pathlib.Path(folder, name + ".log")
        ports = [free_port() for _ in range(NUM_GROUPS + NUM_ROUTERS)]
        groups = [Process(f"supervisor{i}", log(f"group{i}"), "weft-worker", "--model", golden_dir(MODEL), *GROUP_FLAGS,
                          f"--listen=127.0.0.1:{ports[i]}") for i in range(NUM_GROUPS)]
        addresses = ",".join(f"127.0.0.1:{p}" for p in ports[:NUM_GROUPS])
        routers = [Process(f"router{i}", log(f"router{i}"), "weft-router", "--model", golden_dir(MODEL),
                           f"--groups={addresses}", f"--port={ports[NUM_GROUPS + i]}", "--metrics-port=-1",
                           "--log-level=warn", "--max-replays=20") for i in range(NUM_ROUTERS)]
        quick = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        faults, apis = [], []
        try:
            for port in ports[NUM_GROUPS:]:
                apis.append(wait_until(lambda: quiet(lambda: Api(f"127.0.0.1:{port}", quick)), 30, "a router"))
            wait_until(lambda: all(a.serving() for a in apis), 60, "ready")
            monkey = Monkey(draw, groups + routers, print)
            until = time.monotonic() + seconds
            lock, counter, outcomes = threading.Lock(), iter(range(10**9)), collections.Counter()

            def client():
                while time.monotonic() < until:
                    with lock:
                        index = next(counter)
                        own = random.Random(seed + index)
                    prompt = own.choice(prompts)
                    num_tokens = own.randint(1, len(prompt["greedy"]))
                    ids, tries, error = run_stream(apis, own, prompt, num_tokens, index)
                    with lock:
                        outcomes["resumed at another router"] += tries > 1
                        if error:
                            outcomes["failed"] += 1
                            faults.append(f"stream {index}: {error}") if outcomes["failed"] < 10 else None
                        elif ids != prompt["greedy"][:num_tokens]:
                            faults.append(f"stream {index}: wrong tokens")
                            outcomes["wrong"] += 1
                        else:
                            outcomes["complete"] += 1

            with concurrent.futures.ThreadPoolExecutor(num_streams) as pool:
                clients = [pool.submit(client) for _ in range(num_streams)]
                concurrent.futures.wait(clients)
            monkey.stop()
            for done in clients:
                done.result()
            print("harm: " + ", ".join(f"{n} {what}" for what, n in sorted(monkey.counts.items())))
            print("streams: " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
            total = outcomes["complete"] + outcomes["failed"] + outcomes["wrong"]
            share = outcomes["complete"] / max(1, total)
            print(f"{share:.2%} of {total} streams complete")
            if share >= 0.995 and not outcomes["wrong"]:
                faults.clear()
            for process in groups + routers:
                process.keep_running()

            def whole():
                states = apis[0].call("GetServerInfo").groups
                return all(g.ready and g.num_free_blocks == g.num_blocks and not g.num_requests_running for g in states)
            try:
                wait_until(lambda: quiet(whole), 60, "all groups are ready and their blocks free")
            except AssertionError as error:
                faults.append(str(error))
        finally:
            for api in apis:
                api.close()
            pids = [pid for p in groups + routers for pid in p.victims()]
            codes = {p.name: p.stop() for p in routers + groups}
        faults += [f"{name} ended with {code}" for name, code in codes.items() if code != 0]
        faults += [f"process {pid} is left" for pid in pids if alive(pid)]
        faults += leaked_shared_memory(pids)
        if faults:
            for path in sorted(pathlib.Path(folder).iterdir()):
                print(f"--- {path.name}\n" + "".join(path.read_text(errors="replace").splitlines(True)[-30:]))
    return faults


def quiet(condition):
    try:
        return condition()
    except grpc.RpcError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    faults = run(args.seconds, args.streams, args.seed)
    print("\n".join(faults) if faults else "nothing is wrong")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
