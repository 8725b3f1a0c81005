"""Measures FlashInfer's decode attention at the shapes of `cuda_bench gqa` and `cuda_bench mla`.

    gpu_peers.py [--dry-run]

For scripts/gpu_check.sh: a JSON line a figure, measured as cuda_bench does, in bfloat16 over pages of
64 tokens. Where FlashInfer, PyTorch or a GPU is not there, one line that says so. A dry run prints the
shapes and measures nothing.
"""

import argparse
import importlib.util
import json

PAGE_TOKENS = 64
HEAD_DIM, LATENT, ROPE = 128, 512, 64
# Name as in tests/bench/cuda_bench_kernels.cc, sequences, tokens of each, query and KV heads.
GQA = [
    ("b64 8K, 64/8 heads of 128", 64, 8192, 64, 8),
    ("b1 128K, 32/4 heads of 128", 1, 131072, 32, 4),
    ("b64 4K, 64/8 heads of 128: a rank of N=2", 64, 4096, 64, 8),
]
MLA = [
    ("b128 8K, 8 heads", 128, 8192, 8),
    ("b128 1K, 64 heads: Kimi K2, a rank of N=8", 128, 1024, 64),
    ("b128 1K, 128 heads: R1", 128, 1024, 128),
]


def say(**line):
    print(json.dumps({"group": "peers", "peer": "FlashInfer", **line}), flush=True)


def missing():
    """What is not there, or None."""
    for module in ("torch", "flashinfer"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    import torch

    return None if torch.cuda.is_available() else "PyTorch finds no GPU"


def seconds_of(call):
    """As CudaBench::Seconds(): the median of 20 replays of a graph of 10 calls, after an L2 flush."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    milliseconds = []
    for i in range(20):
        flush.fill_(i)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return sorted(milliseconds)[10] / 1e3 / 10


def pages_of(num_seqs, length):
    """Where each sequence's pages begin, and which they are: in no order, as after some serving."""
    import torch

    each = length // PAGE_TOKENS
    indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * each
    pages = torch.randperm(num_seqs * each, device="cuda").int()
    return indptr, pages


def report(kind, name, call, num_bytes):
    seconds = seconds_of(call)
    say(kind=kind, name=name, us=seconds * 1e6, gb_per_s=num_bytes / seconds / 1e9)


def measure_gqa(workspace, name, num_seqs, length, q_heads, kv_heads):
    import flashinfer
    import torch

    indptr, pages = pages_of(num_seqs, length)
    kv = torch.zeros(len(pages), 2, PAGE_TOKENS, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    q = torch.zeros(num_seqs, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    last = torch.full((num_seqs,), PAGE_TOKENS, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=pages.clone(), paged_kv_last_page_len_buffer=last.clone())
    wrapper.plan(indptr, pages, last, q_heads, kv_heads, HEAD_DIM, PAGE_TOKENS,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    report("gqa", name, lambda: wrapper.run(q, kv), kv.numel() * 2)


def measure_mla(workspace, name, num_seqs, length, heads):
    import flashinfer.mla
    import torch

    indptr, pages = pages_of(num_seqs, length)
    rows = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
    latents, keys = (torch.zeros(len(pages), PAGE_TOKENS, dim, dtype=torch.bfloat16, device="cuda")
                     for dim in (LATENT, ROPE))
    q_latent, q_rope = (torch.zeros(num_seqs, heads, dim, dtype=torch.bfloat16, device="cuda")
                        for dim in (LATENT, ROPE))
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        workspace, use_cuda_graph=True, qo_indptr=rows.clone(), kv_indptr=indptr.clone(),
        kv_indices=pages.clone(), kv_len_arr=lengths.clone())
    wrapper.plan(rows, indptr, pages, lengths, heads, LATENT, ROPE, PAGE_TOKENS, False, 0.1,
                 torch.bfloat16, torch.bfloat16)
    report("mla", name, lambda: wrapper.run(q_latent, q_rope, latents, keys),
           (latents.numel() + keys.numel()) * 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true")
    if parser.parse_args().dry_run:
        for kind, shapes in (("gqa", GQA), ("mla", MLA)):
            for name, *shape in shapes:
                say(kind=kind, name=name, shape=shape, not_measured="a dry run")
        return
    absent = missing()
    if absent is not None:
        say(not_measured=absent)
        return
    import torch

    workspace = torch.zeros(512 << 20, dtype=torch.int8, device="cuda")
    for measure, kind, shapes in ((measure_gqa, "gqa", GQA), (measure_mla, "mla", MLA)):
        for name, *shape in shapes:
            try:
                measure(workspace, name, *shape)
            except Exception as error:  # of a peer: whatever it is, our figures go on
                say(kind=kind, name=name, not_measured=repr(error)[:200])
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
