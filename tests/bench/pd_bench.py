"""What a prefill group buys: the gaps between tokens of running streams while long prompts come, and the time to the
first token, with one group and with two on the same cores. Rounds are interleaved: this machine's speed moves.

    scripts/bench_pd.sh [--rounds 3] [--prompt 1024] [--tokens 120]
"""

import argparse
import pathlib
import random
import re
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from api import Api  # noqa: E402
from cluster import ROOT, Cluster  # noqa: E402
from test_pd import PdCluster  # noqa: E402

MODEL = ROOT / "models/smollm2-135m-instruct"
FLAGS = ["--max-model-len=4K", "--kv-cache-memory-bytes=256MiB", "--max-num-batched-tokens=256", "--no-enable-prefix-caching"]


def generate(api, num_prompt, num_tokens, seed):
    """The times of its tokens, from its start."""
    ids = random.Random(seed).choices(range(100, 40000), k=num_prompt)
    start = time.monotonic()
    times = []
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    for message in api.callable("Generate")({"token_ids": {"ids": ids}, "sampling": sampling}, timeout=600):
        times += [time.monotonic() - start] * len(message.token_ids)
    return times


def first_token(api, args, seed):
    return statistics.median(generate(api, args.prompt, 2, seed + i)[0] for i in range(2))


def measure(cluster, args, seed):
    api = Api(cluster.address)
    first = first_token(api, args, seed)
    stop = threading.Event()

    def long_prompts():
        other = Api(cluster.address)
        n = 0
        while not stop.is_set():
            n += 1
            generate(other, args.prompt, 2, seed * 1000 + n)

    load = threading.Thread(target=long_prompts)
    load.start()
    time.sleep(0.3)
    times = generate(api, 16, args.tokens, seed + 7)
    stop.set()
    load.join()
    gaps = sorted(b - a for a, b in zip(times, times[1:]))
    return first, gaps[int(0.99 * (len(gaps) - 1))], statistics.median(gaps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    rows = {"one group": [], "two groups": []}
    transfers, same_threads = [], []
    for round_ in range(args.rounds):
        with Cluster(MODEL, *FLAGS, "--threads-per-rank=2") as one:
            rows["one group"].append(measure(one, args, round_))
        # The prompt's compute is the same as in the prefill group: what is left is the hand-off.
        with Cluster(MODEL, *FLAGS, "--threads-per-rank=1") as alone:
            same_threads.append(first_token(Api(alone.address), args, round_))
        with PdCluster(MODEL, *FLAGS, "--threads-per-rank=1", "--prefill-tensor-parallel-size=1",
                       "--pd-min-prefill-tokens=64") as two:
            two.log.clear()
            rows["two groups"].append(measure(two, args, round_))
            transfers += re.findall(r"sent ([\d.]+) MB in ([\d.]+) ms, ([\d.]+) GB/s; (\d+) %", "".join(two.log))
    print(f"prompts of {args.prompt} tokens, {args.rounds} rounds; medians (min..max), ms")
    for name, results in rows.items():
        cells = [f"{1e3 * statistics.median(c):.0f} ({1e3 * min(c):.0f}..{1e3 * max(c):.0f})" for c in zip(*results)]
        print(f"{name}: first token {cells[0]}; between tokens under load: p99 {cells[1]}, median {cells[2]}")
    one, two = ([statistics.median(c) for c in zip(*results)] for results in rows.values())
    print(f"two groups against one: first token {two[0] / one[0]:.2f} times as late; p99 between tokens {one[1] / two[1]:.1f} "
          "times better")
    print(f"first token of one group with the prefill group's threads: {1e3 * statistics.median(same_threads):.0f} ms; two groups "
          f"take {statistics.median(r[0] / s for r, s in zip(rows['two groups'], same_threads)):.3f} times that")
    if transfers:
        mb, ms, gbs, overlap = (statistics.median(float(t[i]) for t in transfers) for i in range(4))
        print(f"transfers: {mb:.1f} MB in {ms:.0f} ms, {gbs:.3f} GB/s while they move, {overlap:.0f} % while the prompt was "
              "computed")


if __name__ == "__main__":
    main()
