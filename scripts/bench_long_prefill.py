"""Started by bench_long_prefill.sh."""

import argparse
import statistics
import subprocess
import sys
import threading
import time

from api import Api
from cluster import ROOT, Cluster

BUDGET = 256  # tokens of a step, the default


def make_model(layers, positions):
    model = ROOT / f".deps/models/smollm2-size-{layers}-layers-{positions}"
    if not (model / "config.json").exists():
        subprocess.run([sys.executable, ROOT / "scripts/make_model.py", model, f"--num-hidden-layers={layers}",
                        f"--max-position-embeddings={positions}"], check=True)
    return model


class Running:
    """A request that decodes; when each of its tokens came."""

    def __init__(self, api, index, max_tokens):
        self.times = []
        self.call = api.callable("Generate")({
            "token_ids": {"ids": [index + 3] * 16}, "cache_salt": str(index),
            "sampling": {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}}, timeout=3600)
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        try:
            for message in self.call:
                if message.token_ids:
                    self.times.append(time.monotonic())
        except Exception:  # cancelled at the end
            pass

    def gaps(self, start, end):
        return [b - a for a, b in zip(self.times, self.times[1:]) if a >= start and b <= end]


def first_token(api, ids, salt):
    """(when it was sent, when its first token came)"""
    start = time.monotonic()
    for message in api.callable("Generate")({
            "token_ids": {"ids": ids}, "cache_salt": salt,
            "sampling": {"max_tokens": 1, "ignore_eos": True, "temperature": 0}}, timeout=3600):
        if message.token_ids:
            return start, time.monotonic()
    sys.exit("bench_long_prefill: no token came")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt-len", type=int, default=16384)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--num-hidden-layers", type=int, default=30)
    args = parser.parse_args()
    positions = max(32768, 2 * args.prompt_len)
    ids = [(7 * i) % 49000 for i in range(args.prompt_len)]
    with Cluster(make_model(args.num_hidden_layers, positions), "--skip-tokenizer-init", "-tp", 2, "-dcp", 2,
                 f"--max-model-len={args.prompt_len + 8192}", timeout=300) as cluster:
        api = Api(cluster.address)
        first_token(api, ids[:512], "warm-up")
        # The last quarter of the prompt has the slowest steps.
        quarter = args.prompt_len // 4
        short_start, short_end = first_token(api, ids[:-quarter], "alone, shorter")
        start, end = first_token(api, ids, "alone")
        alone = end - start
        full_step = (alone - (short_end - short_start)) / (quarter / BUDGET)
        running = [Running(api, i, 8000) for i in range(args.running)]
        while not all(len(r.times) > 4 for r in running):
            time.sleep(0.05)
        start, end = first_token(api, ids, "beside them")
        gaps = sorted(gap for r in running for gap in r.gaps(start, end))
        for r in running:
            r.call.cancel()
        api.close()
    if not gaps:
        sys.exit("bench_long_prefill: the running requests had no token while the prompt was computed")
    p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    rate = alone / (end - start)
    print(f"a full step of {BUDGET} tokens, late in the prompt: {1000 * full_step:.0f} ms")
    print(f"{args.running} requests beside it: {len(gaps)} tokens, inter-token latency median "
          f"{1000 * statistics.median(gaps):.0f} ms, p99 {1000 * p99:.0f} ms, {p99 / full_step:.2f} full steps")
    print(f"the prompt of {args.prompt_len} tokens: {args.prompt_len / alone:.0f} tokens/s alone, "
          f"{args.prompt_len / (end - start):.0f} beside them, {100 * rate:.0f} %")
    sys.exit(0 if p99 <= 2 * full_step and rate >= 0.5 else 1)


if __name__ == "__main__":
    main()
