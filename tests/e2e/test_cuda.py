"""The CUDA backend as processes: under emulation (--device=cuda-emu), and what is said where there is no GPU."""

import json
import os
import re
import shutil
import subprocess

import pytest

import cluster
from cluster import BIN, ENV, ROOT, Cluster, golden, golden_dir, wait_until

EMULATED = ["--device=cuda-emu", "--dtype=float32", "--max-model-len=128", "--max-num-seqs=4",
            "--stall-timeout=60s", "--num-gpu-blocks-override=16"]
EX_CONFIG = 78
CUDA_BIN = ROOT / "build/cuda/bin"


def ids(prompt):
    return "--prompt-token-ids=" + ",".join(map(str, prompt["ids"]))


def worker(*flags, timeout=60, **environment):
    out = subprocess.run([BIN / "weft-worker", "--rank=0", "--listen=127.0.0.1:0", "--metrics-port=-1", *map(str, flags)],
                         env={**ENV, **environment}, capture_output=True, text=True, timeout=timeout)
    return out.returncode, out.stderr


def test_ranks_on_devices_give_the_references_tokens():
    with Cluster(golden_dir("llama_gqa"), *EMULATED, "-tp", 2, "-dcp", 2) as weft:
        for prompt in (golden("llama_gqa")[name] for name in ("len7", "len33")):
            got = weft.generate(ids(prompt), "--temperature=0", "--max-tokens=6", "--ignore-eos")
            assert got[0]["token_ids"] == prompt["greedy"][:6]
        assert any("computing on emulated GPU" in line for line in weft.log)
        assert weft.stop() == 0


# The fault comes once the group serves: loading, warming up and recording take fewer launches.
@pytest.mark.parametrize("fault, said", [
    ("kernel GumbelArgmax after 40", r"step \d+: .*cudaErrorLaunchFailure: GumbelArgmax: "),
    ("collective 1 after 400", r"step \d+: .*the link is down"),
])
def test_a_device_that_fails_ends_the_group_which_restarts(monkeypatch, fault, said):
    monkeypatch.setattr(cluster, "ENV", {**ENV, "CUDA_EMU_FAULT": fault})
    prompt = golden("llama_gqa")["len7"]
    with Cluster(golden_dir("llama_gqa"), *EMULATED, "-tp", 2, "-dcp", 2, "--max-replays=0") as weft:
        ranks = set(weft.rank_pids().values())
        error = weft.generate(ids(prompt), "--temperature=0", "--max-tokens=90", "--ignore-eos",
                              check=False)[0].get("error", {})
        assert (error.get("code"), error.get("reason")) == ("UNAVAILABLE", "RANK_LOST"), error
        wait_until(lambda: any(re.search(said, line) for line in weft.log), 20, said)
        # Another one serves until it meets the fault in its turn.
        wait_until(lambda: len(weft.rank_pids()) == 2 and not ranks & set(weft.rank_pids().values()), 30, "new ranks")
        weft.wait_ready()
        got = weft.generate(ids(prompt), "--temperature=0", "--max-tokens=4", "--ignore-eos")
        assert got[0]["token_ids"] == prompt["greedy"][:4]


def test_too_little_device_memory_is_an_error_at_start_with_the_sizes():
    code, said = worker("--model", golden_dir("llama_gqa"), *EMULATED, CUDA_EMU_MEMORY_BYTES="33600000")
    assert code == EX_CONFIG, said
    assert re.search(r"\d+ bytes of emulated GPU: cudaErrorMemoryAllocation; \d+ of 33600000 bytes are free", said), said
    code, said = worker("--model", golden_dir("llama_gqa"), *EMULATED, "--num-gpu-blocks-override=900000",
                        CUDA_EMU_MEMORY_BYTES="100000000")
    assert code == EX_CONFIG, said
    assert "GiB are free" in said, said


def test_integer_weights_are_refused_by_name():
    code, said = worker("--model", golden_dir("llama_gqa"), *EMULATED[:1], "--quantization=int8")
    assert code == EX_CONFIG and "--quantization: --device=cuda-emu has no kernels" in said, said


def test_programs_link_no_cuda():
    for program in ("weft-worker", "weft", "weft-router"):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]",
                            subprocess.run(["readelf", "-d", BIN / program], capture_output=True, text=True,
                                           check=True).stdout)
        assert needed, program
        assert not [name for name in needed if re.search("cuda|cublas|nccl|nvidia", name, re.I)], needed


def test_without_a_gpu_one_line_says_so():
    nvcc = shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    module = CUDA_BIN / "libweft_cuda.so"
    if nvcc and os.environ.get("CI"):
        assert module.exists(), f"{nvcc} is there, and nobody built {module}"
    code, said = worker("--model", golden_dir("llama_gqa"), "--device=cuda", "--dtype=float32",
                        LD_LIBRARY_PATH=str(CUDA_BIN))
    if "computing on" in said:
        pytest.skip("there is a GPU: " + said)
    assert code == EX_CONFIG, said
    lines = [line for line in said.splitlines() if "weft-worker: rank 0:" in line]
    assert len(lines) == 1, said
    expected = "no CUDA device: " if module.exists() else "this build has no libweft_cuda.so"
    assert expected in lines[0], said
