#!/usr/bin/env python3
"""What nvcc makes of each CUDA kernel, as a table in kernels/README.md.

Registers, spills, shared memory, and how many threads of an SM's 2048 fit at once. With what the launches of
tensor core kernels ask for; what those of others do (generic attention, routing) depends on the model and comes on
top. Needs the toolkit, no GPU. Compiles every kernel anew,
for minutes. Exits with 1 if a kernel spills.
  scripts/cuda_resources.py            writes the table
  scripts/cuda_resources.py OP...      prints that of kernels/cuda/OP.cu
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "kernels/README.md"
BEGIN, END = "<!-- scripts/cuda_resources.py -->\n", "<!-- end -->\n"
# Shared memory of an SM; registers, threads and blocks are the same on all of these.
ARCHITECTURES = {"sm_80": 164 * 1024, "sm_90a": 228 * 1024, "sm_100a": 228 * 1024}
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
RESERVED_SHARED = 1024  # of each block


def find_nvcc():
    home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    nvcc = shutil.which("nvcc") or shutil.which(home / "bin/nvcc")
    if nvcc is None:
        sys.exit("scripts/cuda_resources.py: no nvcc in PATH, CUDA_HOME or /usr/local/cuda")
    return nvcc


def run_nvcc(nvcc, op, arch, *flags):
    command = [nvcc, "-std=c++20", "-O3", "-I.", "-gencode", f"arch=compute_{arch[3:]},code={flags[0]}",
               *flags[1:], f"kernels/cuda/{op}.cu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{done.stderr}")
    return done.stdout + done.stderr


def short_names(mangled):
    """Names and template arguments of kernels."""
    text = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout
    text = text.replace("(anonymous namespace)::", "").replace("weft::kernels::cuda::", "")
    text = re.sub(r"\((int|bool)\)", "", text)
    return [re.sub(r"\(.*\)$", "", re.sub(r"^void ", "", name)) for name in text.splitlines()]


def block_threads(nvcc, op):
    """What __launch_bounds__ says, by short name: mangled ones differ from run to run."""
    ptx = run_nvcc(nvcc, op, "sm_80", "compute_80", "-ptx", "-o", "-")
    found = re.findall(r"\.entry (\w+)\([^{]*?\.maxntid (\d+)", ptx, re.S)
    return dict(zip(short_names([name for name, _ in found]), (int(threads) for _, threads in found)))


def launch_shared(op, kernels):
    """Shared bytes that launches ask for: kSharedBytes of the shape that a kernel is a template of."""
    shapes = {kernel: match[1] for kernel in kernels if (match := re.fullmatch(r"\w+<(\w+<.*>) ?>", kernel))}
    source = f'#include "kernels/cuda/{op}.cu"\nnamespace weft::kernels::cuda {{\n' + "".join(
        f'extern "C" {{ extern const unsigned long shared_bytes_{i} = {shape}::kSharedBytes; }}\n'
        for i, shape in enumerate(shapes.values())) + "}\n"
    command = ["g++", "-x", "c++", "-std=c++20", "-I.", "-DWEFT_CUDA_EMU", "-w", "-S", "-o", "-", "-"]
    assembly = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=True).stdout if shapes else ""
    found = dict(re.findall(r"^shared_bytes_(\d+):\s+\.quad\s+(\d+)", assembly, re.M))
    return {kernel: int(found[str(i)]) for i, kernel in enumerate(shapes)}


def kernels_of(nvcc, op):
    """{kernel: one (registers, spilled bytes, shared bytes, threads of a block, of an SM) per architecture}."""
    threads = block_threads(nvcc, op)
    of_launch = launch_shared(op, threads)
    pattern = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
                         r".*?Used (\d+) registers([^\n]*)", re.S)
    kernels = {}
    for arch, shared_of_sm in ARCHITECTURES.items():
        found = pattern.findall(run_nvcc(nvcc, op, arch, arch, "-cubin", "--resource-usage", "-o", "/dev/null"))
        for kernel, (_, stores, loads, registers, rest) in zip(short_names([f[0] for f in found]), found):
            shared = int((re.search(r"(\d+) bytes smem", rest) or [0, 0])[1]) + of_launch.get(kernel, 0)
            warps = threads[kernel] // 32
            of_warp = -(-int(registers) * 32 // 256) * 256  # given to warps in units of 256
            blocks = min(BLOCKS, THREADS // threads[kernel], REGISTERS // of_warp // warps,
                         shared_of_sm // (shared + RESERVED_SHARED))
            kernels.setdefault(kernel, []).append(
                (int(registers), int(stores) + int(loads), shared, threads[kernel], blocks * threads[kernel]))
    return kernels


def cell(values):
    """One number where all architectures have the same."""
    return " / ".join(map(str, values if len(set(values)) > 1 else values[:1]))


def main():
    nvcc = find_nvcc()
    ops = sys.argv[1:] or sorted(path.stem for path in (ROOT / "kernels/cuda").glob("*.cu"))
    kernels = {name: found for op in ops for name, found in kernels_of(nvcc, op).items()}
    table = (f"| kernel ({' / '.join(ARCHITECTURES)}) | registers | spilled, bytes | shared, bytes | "
             "threads of a block | threads of an SM |\n|---|---|---|---|---|---|\n")
    for name in sorted(kernels):
        table += f"| `{name}` | " + " | ".join(cell(values) for values in zip(*kernels[name])) + " |\n"
    if sys.argv[1:]:
        print(table, end="")
    else:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    spilled = [name for name, found in kernels.items() if any(values[1] > 0 for values in found)]
    if spilled:
        sys.exit("these kernels spill registers: " + ", ".join(spilled))


main()
