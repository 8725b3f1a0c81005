"""Weft and llama.cpp side by side; scripts/bench_peer.sh builds both and calls this.

Each round measures every cell once with each program, the two right after each other, so that what
else the machine does meets both. Both run in one process without a server. Weft's figures include
its scheduler, plans and sampler; llama.cpp's tools pick no token.
"""

import argparse
import dataclasses
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
PEER_FLOOR = 1.0  # of llama.cpp, in every cell
LIMIT_FLOOR = 0.35  # of the slower limit, batch 8


def decode(batch, prompt, tokens, ahead=0):
    """Of `batch` sequences behind prompts of so many tokens. Weft decodes while others are in their prompts: it makes
    `ahead` tokens more, until all decode."""
    context = batch * (prompt + tokens)
    return Cell(
        batch=batch,
        weft=["--prompt", str(prompt), "--tokens", str(tokens + ahead + 1), "--batch", str(batch),
              "--max-model-len", str(prompt + tokens + ahead + 1)],
        peer=["llama-batched-bench", "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(batch), "-c", str(context),
              "-b", "2048", "-pps"],
    )


def prefill(tokens):
    return Cell(batch=0, weft=["--prompt", str(tokens), "--tokens", "1", "--max-model-len", str(tokens + 1)],
                peer=["llama-bench", "-p", str(tokens), "-n", "0"])


@dataclasses.dataclass
class Cell:
    """The arguments of each program, and how many sequences decode; 0: none does."""

    batch: int
    weft: list[str]
    peer: list[str]


CELLS = {
    PREFILL: prefill(512),
    "prefill 2048": prefill(2048),
    DECODE: decode(1, 128, 128),
    "decode, batch 1 at 2048": decode(1, 2048, 64),
    DECODE_8: decode(8, 128, 64),
    "decode, batch 32": decode(32, 128, 64, ahead=24),
    "decode, batch 64": decode(64, 128, 64, ahead=48),
    "decode, batch 8 at 1024": decode(8, 1024, 64, ahead=16),
    "decode, batch 32 at 1024": decode(32, 1024, 64, ahead=24),
    "decode, batch 64 at 1024": decode(64, 1024, 64, ahead=48),
    "decode, batch 8 at 4096": decode(8, 4096, 32, ahead=16),
}
QUICK = (PREFILL, DECODE, DECODE_8)


def run(command):
    """The standard output of `command`; ends the program with its errors when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"bench_peer: {' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


def measure_weft(args, cell):
    command = [args.weft / "engine_bench", "--model", args.model, "--dtype", args.dtype]
    command += ["--quantization", args.quantization]
    command += ["--threads", str(args.threads), "--tries", "1", *CELLS[cell].weft]
    return json.loads(run(command))


def measure_peer(args, cell):
    """Tokens per second, with and without flash attention: whichever is faster."""
    program, *flags = CELLS[cell].peer
    command = [args.peer / program, "-m", args.gguf, "-t", str(args.threads), *flags]
    speeds = []
    for flash in ("0", "1"):
        if program == "llama-bench":
            speeds.append(json.loads(run([*command, "-fa", flash, "-r", "1", "-o", "json"]))[0]["avg_ts"])
        else:
            on = "on" if flash == "1" else "off"
            lines = run([*command, "-fa", on, "--output-format", "jsonl"]).splitlines()
            speeds.append(json.loads(next(line for line in lines if line.startswith("{")))["speed_tg"])
    return max(speeds)


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
    for cell, samples in result["weft"].items():
        batch = CELLS[cell].batch
        if batch == 0:
            continue
        seconds = limit_seconds(samples[0], batch)
        shares = spread([100 * limit_share(sample, batch) for sample in samples])
        print(f"{cell}: {shares} % of the slower limit of its weights, {max(seconds, key=seconds.get)}")


def check_floors(result):
    """True when all are met; prints each."""
    met = True
    for cell, samples in result["weft"].items():
        ratio = statistics.median(own["tokens_per_second"] / peer for own, peer in zip(samples, result["peer"][cell]))
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
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--cells", default="all", choices=("all", "quick"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, help="default: tests/bench/results/peer.json")
    args = parser.parse_args()
    cells = QUICK if args.cells == "quick" else CELLS

    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": run(["git", "rev-parse", "--short", "HEAD"]).strip(),
        "machine": machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "weights": args.dtype if args.quantization == "none" else args.quantization,
        "load_before": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
        "weft": {cell: [] for cell in cells},
        "peer": {cell: [] for cell in cells},
    }
    for done in range(args.rounds):
        for cell in cells:
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
