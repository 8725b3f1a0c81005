"""Whether memory, descriptors and threads of a router and its ranks stay flat under many requests, some
of which end because their client goes.

    .venv/bin/python tests/e2e/flat.py [--requests 10000] [--chunks 20]

Prints a row per chunk, taken when the cluster is idle again, and a verdict; exits 1 when something grew.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

from api import Api
from cluster import BIN, ENV, Cluster, children, command_line, golden_dir, wait_until

CANCELLED = 0.1  # of all requests
# What may come after the warm-up: allocators keep a little more now and then, and gRPC starts a thread
# when its others are busy.
MAX_GROWTH = {"MiB": 4.0, "fds": 0, "threads": 2}


def processes(cluster):
    """{name: pid} of the router and the ranks."""
    found = {}
    for pid in children(cluster.process.pid):
        if match := re.search(r"weft-router|--rank=(\d+)", command_line(pid)):
            found["router" if match.group(1) is None else f"rank {match.group(1)}"] = pid
    return dict(sorted(found.items()))


def usage(pid):
    status = pathlib.Path("/proc", str(pid), "status").read_text()
    return {"MiB": int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024,
            "fds": len(list(pathlib.Path("/proc", str(pid), "fd").iterdir())),
            "threads": int(re.search(r"Threads:\s+(\d+)", status).group(1))}


def idle(cluster):
    group = cluster.status()
    return group and group["num_requests_running"] == group["num_requests_waiting"] == 0


def aborted(cluster):
    """How many requests the leader has ended because their client went."""
    address = cluster.status()["ranks"][0]["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        found = re.search(r'^weft_request_success_total{.*finished_reason="abort".*} (\d+)', answer.read().decode(), re.M)
    return int(found.group(1)) if found else 0


def send_chunk(cluster, folder, count, first):
    """`count` requests: most end, the others lose their client after their first token."""
    num_cancelled = max(1, round(count * CANCELLED))
    aborted_before = aborted(cluster)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(
        json.dumps({"prompt_token_ids": [5 + (first + i) % 40] * (1 + i % 30), "max_tokens": 1 + i % 8,
                    "ignore_eos": True, "temperature": i % 2, "seed": i}) + "\n" for i in range(count - num_cancelled)))
    client = Api(cluster.address)
    endless = {"token_ids": {"ids": [5, 6]}, "sampling": {"max_tokens": 480, "ignore_eos": True}}
    doomed = [client.call("Generate", endless) for _ in range(num_cancelled)]
    for stream in doomed:
        next(stream)
    with subprocess.Popen([BIN / "weft", "generate", "--address", cluster.address, "--format=json",
                           "--concurrency=64", "--prompts-file", prompts], env=ENV, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        client.close()
        out, err = asked.communicate(timeout=600)
    assert asked.returncode == 0, err[-2000:]
    assert len(out.splitlines()) == count - num_cancelled
    wait_until(lambda: idle(cluster), 30, "idle")
    assert aborted(cluster) - aborted_before == num_cancelled


def wait_for_closed_connections(pids, baseline):
    """They close a moment after their client; those that do not show in the verdict."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(usage(pid)["fds"] > baseline[name]["fds"]
                                              for name, pid in pids.items()):
        time.sleep(0.1)


def run(num_requests, num_chunks, growth=None, print=print):
    """What grew beyond what is allowed, in words; nothing when all is flat."""
    growth = {**MAX_GROWTH, **(growth or {})}
    per_chunk = num_requests // num_chunks
    warm = max(1, num_chunks // 5)  # chunks whose growth does not count
    flags = ["-tp", 2, "-dcp", 2, "--dtype=float32", "--kv-cache-memory-bytes=1MiB", "--max-num-waiting=4096"]
    with tempfile.TemporaryDirectory() as folder, Cluster(golden_dir("llama_mqa"), *flags) as cluster:
        pids = processes(cluster)
        print("requests  " + "  ".join(f"{name:>24}" for name in pids))
        baseline = {}
        for chunk in range(num_chunks):
            send_chunk(cluster, pathlib.Path(folder), per_chunk, chunk * per_chunk)
            assert processes(cluster) == pids, "a process was restarted"
            if baseline:
                wait_for_closed_connections(pids, baseline)
            now = {name: usage(pid) for name, pid in pids.items()}
            if chunk == warm - 1:
                baseline = now
            print(f"{(chunk + 1) * per_chunk:>8}  " + "  ".join(
                f"{u['MiB']:>8.1f} MiB {u['fds']:>3} fd {u['threads']:>3} t" for u in now.values()))
        return [f"{name}: {what} grew from {baseline[name][what]:.1f} to {now[name][what]:.1f}"
                for name in pids for what in growth if now[name][what] > baseline[name][what] + growth[what]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--chunks", type=int, default=20)
    args = parser.parse_args()
    grown = run(args.requests, args.chunks)
    print("\n".join(grown) if grown else f"flat over {args.requests} requests, {CANCELLED:.0%} of them cancelled")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
