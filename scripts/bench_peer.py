"""Weft and llama.cpp side by side; scripts/bench_peer.sh builds both and calls this.

Each round measures every cell once with each program, the two right after each other, so that what
else the machine does meets both. Both run in one process without a server. Weft's figures include
its scheduler, plans and sampler; llama.cpp's tools pick no token.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

PREFILL = "prefill 512"
DECODE = "decode, batch 1"
DECODE_8 = "decode, batch 8"
PEER_FLOOR = 0.5  # of llama.cpp, prefill and batch 1
LIMIT_FLOOR = 0.35  # of the slower limit, batch 8
REPEATS = "2"  # of a cell in a round, for each program

# Arguments of each program. Decode starts at a short context and goes on for 128 or 64 tokens.
WEFT_CELLS = {
    PREFILL: ["--prompt", "512", "--tokens", "1"],
    DECODE: ["--prompt", "1", "--tokens", "129"],
    DECODE_8: ["--prompt", "16", "--tokens", "65", "--batch", "8"],
}
PEER_CELLS = {
    PREFILL: ["llama-bench", "-p", "512", "-n", "0"],
    DECODE: ["llama-bench", "-p", "0", "-n", "128"],
    DECODE_8: ["llama-batched-bench", "-npp", "16", "-ntg", "64", "-npl", "8", "-c", "2048"],
}


def run(command):
    """The standard output of `command`; ends the program with its errors when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"bench_peer: {' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


def measure_weft(args, cell):
    command = [args.weft / "engine_bench", "--model", args.model, "--dtype", "float16"]
    command += ["--quantization", args.quantization]
    command += ["--threads", str(args.threads), "--tries", REPEATS, *WEFT_CELLS[cell]]
    return json.loads(run(command))


def measure_peer(args, cell):
    """Tokens per second."""
    program, *flags = PEER_CELLS[cell]
    command = [args.peer / program, "-m", args.gguf, "-t", str(args.threads), *flags]
    if program == "llama-bench":
        return json.loads(run([*command, "-r", REPEATS, "-o", "json"]))[0]["avg_ts"]
    lines = run([*command, "--output-format", "jsonl"]).splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))["speed_tg"]


def limit_seconds(sample, batch):
    """The least time of a decode step of `batch` rows by each of the machine's limits."""
    return {
        "bandwidth": sample["weight_bytes"] / sample["bytes_per_second"],
        "multiply-adds": batch * sample["flops_per_token"] / sample["flops_per_second"],
    }


def limit_share(sample, batch):
    return sample["tokens_per_second"] / batch * max(limit_seconds(sample, batch).values())


def spread(values, digits=0):
    return (
        f"{statistics.median(values):.{digits}f} "
        f"({min(values):.{digits}f}..{max(values):.{digits}f})"
    )


def machine():
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", "").split()
    kinds = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpus": len(os.sched_getaffinity(0)),
        "features": [kind for kind in kinds if kind in flags],
        "kernel": platform.release(),
    }


def print_report(result):
    about = result["machine"]
    print(
        f"{about['cpu']}, {about['cpus']} CPUs ({' '.join(about['features'])}), "
        f"{result['threads']} threads, {result['rounds']} rounds, weights {result['weights']}, KV float16"
    )
    print(f"load average {result['load_before']} before, {result['load_after']} after")
    print(f"{'tokens/s, median (min..max)':32}{'weft':>20}{'llama.cpp':>20}{'ratio':>20}")
    for cell, samples in result["weft"].items():
        own = [sample["tokens_per_second"] for sample in samples]
        peer = result["peer"][cell]
        ratios = [a / b for a, b in zip(own, peer)]
        print(f"{cell:32}{spread(own):>20}{spread(peer):>20}{spread(ratios, 2):>20}")
    print(f"{'limits of the machine':32}{'read GB/s':>20}{'GFLOP/s':>20}")
    everything = [sample for samples in result["weft"].values() for sample in samples]
    bandwidth = spread([sample["bytes_per_second"] * 1e-9 for sample in everything], 1)
    flops = spread([sample["flops_per_second"] * 1e-9 for sample in everything])
    print(f"{'  best of a few tries each':32}{bandwidth:>20}{flops:>20}")
    for cell, batch in ((DECODE, 1), (DECODE_8, 8)):
        samples = result["weft"][cell]
        seconds = limit_seconds(samples[0], batch)
        shares = spread([100 * limit_share(sample, batch) for sample in samples])
        print(f"{cell}: {shares} % of the slower limit, {max(seconds, key=seconds.get)}")


def check_floors(result):
    """True when all are met; prints each."""
    met = True
    for cell in (PREFILL, DECODE):
        pairs = zip(result["weft"][cell], result["peer"][cell])
        ratio = statistics.median(own["tokens_per_second"] / peer for own, peer in pairs)
        met &= ratio >= PEER_FLOOR
        print(f"floor {cell}: {ratio:.2f} of llama.cpp, at least {PEER_FLOOR}")
    share = statistics.median(limit_share(sample, 8) for sample in result["weft"][DECODE_8])
    print(f"floor {DECODE_8}: {share:.2f} of the slower limit, at least {LIMIT_FLOOR}")
    return met and share >= LIMIT_FLOOR


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", type=pathlib.Path, required=True, help="folder of engine_bench")
    parser.add_argument("--peer", type=pathlib.Path, required=True, help="folder of llama-bench")
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"),
                        help="of Weft's weights; --gguf is the peer's equivalent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, help="default: tests/bench/results/peer.json")
    args = parser.parse_args()

    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": run(["git", "rev-parse", "--short", "HEAD"]).strip(),
        "machine": machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "weights": "float16" if args.quantization == "none" else args.quantization,
        "load_before": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
        "weft": {cell: [] for cell in WEFT_CELLS},
        "peer": {cell: [] for cell in PEER_CELLS},
    }
    for done in range(args.rounds):
        for cell in WEFT_CELLS:
            own = measure_weft(args, cell)
            peer = measure_peer(args, cell)
            result["weft"][cell].append(own)
            result["peer"][cell].append(peer)
            print(
                f"round {done + 1}/{args.rounds}, {cell}: {own['tokens_per_second']:.0f} "
                f"and {peer:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    result["load_after"] = "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())

    print_report(result)
    met = check_floors(result)
    output = args.output or pathlib.Path("tests/bench/results/peer.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {output}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
