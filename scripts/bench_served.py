"""The clients of scripts/bench_served.sh for llama-server: many requests at once, each on a connection of its own."""

import argparse
import concurrent.futures
import json
import random
import time

import requests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--input-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    args = parser.parse_args()

    def request(seed, output_len):
        prompt = random.Random(seed).choices(range(100, 49_000), k=args.input_len)
        answer = requests.post(args.url + "/completion", timeout=1200, json={
            "prompt": prompt, "n_predict": output_len, "ignore_eos": True, "cache_prompt": False, "temperature": 0})
        answer.raise_for_status()
        return answer.json()["tokens_predicted"]

    request(0, 4)  # warms up
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        start = time.monotonic()
        tokens = sum(pool.map(lambda seed: request(seed, args.output_len), range(1, args.clients + 1)))
        seconds = time.monotonic() - start
    if tokens != args.clients * args.output_len:
        raise SystemExit(f"bench_served: {tokens} tokens came, not {args.clients} x {args.output_len}")
    print(json.dumps({"output_throughput": tokens / seconds}))


if __name__ == "__main__":
    main()
