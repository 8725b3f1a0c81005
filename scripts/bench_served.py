"""The clients of scripts/bench_served.sh for other servers: many requests at once, each on a connection of its own."""

import argparse
import concurrent.futures
import json
import random
import time

import requests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", help="speak OpenAI's API, and ask for this; else llama-server's")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--input-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    args = parser.parse_args()

    def request(seed, output_len):
        prompt = random.Random(seed).choices(range(100, 49_000), k=args.input_len)
        asked = {"prompt": prompt, "ignore_eos": True, "temperature": 0}
        if args.model:
            path, asked = "/v1/completions", asked | {"model": args.model, "max_tokens": output_len}
        else:
            path, asked = "/completion", asked | {"n_predict": output_len, "cache_prompt": False}
        answer = requests.post(args.url + path, timeout=1200, json=asked)
        answer.raise_for_status()
        return answer.json()["usage"]["completion_tokens"] if args.model else answer.json()["tokens_predicted"]

    request(0, 4)  # warms up
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        start = time.monotonic()
        tokens = sum(pool.map(lambda seed: request(seed, args.output_len), range(1, args.requests + 1)))
        seconds = time.monotonic() - start
    if tokens != args.requests * args.output_len:
        raise SystemExit(f"bench_served: {tokens} tokens came, not {args.requests} x {args.output_len}")
    print(json.dumps({"output_throughput": tokens / seconds,
                      "uncached_input_throughput": args.requests * args.input_len / seconds}))


if __name__ == "__main__":
    main()
