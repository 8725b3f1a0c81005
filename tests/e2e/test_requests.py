"""What a request meets on its way: capacity, cancellation, deadlines, bad input."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from cluster import BIN, ENV, ROOT, Cluster, generate_offline, golden, golden_dir, wait_until

MODEL = "llama_mqa"


def no_kv_in_use(cluster):
    group = cluster.status()
    return group and group["num_free_blocks"] == group["num_blocks"] and group["num_requests_running"] == 0


def test_position_sharding_serves_what_one_rank_could_not_hold():
    prompt = golden(MODEL)["len130"]
    ids = ",".join(map(str, prompt["ids"]))
    # K and V of one head of 16 in 2 layers in fp32: 256 bytes a token; a rank gets 128 tokens.
    flags = ["-tp", 2, "--block-size=16", "--kv-cache-memory-bytes", 128 * 256, "--dtype=float32"]
    ask = ["--prompt-token-ids", ids, "--temperature=0", "--ignore-eos", "--max-tokens=48"]
    with Cluster(golden_dir(MODEL), *flags, "-dcp", 1) as cluster:
        refused = cluster.generate(*ask, check=False)[0]
        assert refused["error"]["code"] == "INVALID_ARGUMENT"
        assert "128" in refused["error"]["message"]
    with Cluster(golden_dir(MODEL), *flags, "-dcp", 2) as cluster:
        assert cluster.status()["max_model_len"] in (256, "256")
        assert cluster.generate(*ask)[0]["token_ids"] == prompt["greedy"]


def test_peak_memory_is_what_start_up_prints(tmp_path):
    # Code, heap and what gRPC and UCX keep for themselves, whatever the model.
    base = 64 << 20
    # Lines of 300 tokens that take up the whole cache together: 11,520 bytes a token and rank.
    kv_bytes = 24_000_000
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(
        json.dumps({"prompt_token_ids": [(7 * i + j) % 49152 for j in range(300)], "max_tokens": 2}) + "\n"
        for i in range(14)))
    with Cluster(ROOT / "models/smollm2-135m-instruct", "-tp", 2, "-dcp", 2,
                 "--kv-cache-memory-bytes", kv_bytes) as cluster:
        cluster.generate("--prompts-file", prompts, "--concurrency=14", "--temperature=0")
        ranks = wait_until(lambda: [r for r in cluster.status()["ranks"] if int(r["workspace_bytes"])], 10, "sizes")
        assert len(ranks) == 2
        for rank in ranks:
            status = pathlib.Path("/proc", str(rank["pid"]), "status").read_text()
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) << 10
            sizes = [int(rank[name]) for name in ("weight_bytes", "kv_bytes", "workspace_bytes")]
            assert sizes[1] <= kv_bytes
            # Nearly all of the cache was written; the least is to see that the peak is of that run.
            assert sizes[0] + 0.9 * sizes[1] < peak < sum(sizes) + base, (rank, peak)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(golden_dir(MODEL), "-tp", 2, "-dcp", 2, "--dtype=float32") as running:
        yield running


@pytest.fixture(scope="module")
def slow_cluster():
    """A real model: the tiny ones are done before a signal reaches them."""
    with Cluster(ROOT / "models/smollm2-135m-instruct", "-tp", 2, "-dcp", 2, "--max-model-len=1K",
                 "--kv-cache-memory-bytes=64MiB") as running:
        yield running


def start(cluster, max_tokens=480):
    return subprocess.Popen(
        [BIN / "weft", "generate", "--address", cluster.address, "--format=json", "--prompt-token-ids=5,6,7",
         "--ignore-eos", "--temperature=0", f"--max-tokens={max_tokens}"],
        env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL], ids=["cancel", "disconnect"])
def test_a_client_that_goes_frees_its_blocks(slow_cluster, sig):
    clients = [start(slow_cluster) for _ in range(4)]
    wait_until(lambda: slow_cluster.status()["num_requests_running"] > 0, 20, "running")
    for client in clients:
        client.send_signal(sig)
    for client in clients:
        assert client.wait(10) != 0
    wait_until(lambda: no_kv_in_use(slow_cluster), 3, "blocks back")


BAD_REQUESTS = [
    (["--prompt-token-ids=1,99999"], "99999"),
    (["--prompt-token-ids=-1"], "-1"),
    (["--prompt="], "empty"),
    (["--prompt-token-ids=" + ",".join(["5"] * 600)], "600"),
    (["--prompt-token-ids=5", "--temperature=-1"], "temperature"),
    (["--prompt-token-ids=5", "--temperature=nan"], "temperature"),
    (["--prompt-token-ids=5", "--top-p=0"], "top_p"),
    (["--prompt-token-ids=5", "--top-p=1.5"], "top_p"),
    (["--prompt-token-ids=5", "--top-k=-2"], "top_k"),
    (["--prompt-token-ids=5", "--max-tokens=0"], "max_tokens"),
]


@pytest.mark.parametrize("flags,mention", BAD_REQUESTS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_bad_request_is_refused_and_harms_nobody(cluster, flags, mention):
    out = subprocess.run([BIN / "weft", "generate", "--address", cluster.address, "--format=json", *flags],
                         env=ENV, capture_output=True, text=True, timeout=30)
    assert out.returncode != 0
    said = out.stderr + out.stdout
    assert mention in said and ("INVALID_ARGUMENT" in said or not out.stdout), said
    good = golden(MODEL)["len7"]
    assert cluster.generate("--prompt-token-ids", ",".join(map(str, good["ids"])), "--temperature=0",
                            "--ignore-eos", "--max-tokens=48")[0]["token_ids"] == good["greedy"]


BAD_STARTS = [
    (["-tp", 3, "-dcp", 2], "decode-context-parallel-size"),
    (["-tp", 9], "9"),
    (["-tp", 2, "-dcp", 2, "--block-size=10", "--cp-kv-cache-interleave-size=4"], "8"),
    (["--prefill-context-parallel-size=2"], "prefill-context-parallel-size"),
    (["--device=cuda"], "libweft_cuda.so"),
    (["--device=cuda-emu", "--enforce-eager", "--quantization=int8"], "no kernels for integer weights"),
    (["--speculative-config={}"], "--speculative-config: "),
    (["--max-model-len=1000000"], "512"),
    (["-tp", 2, "--max-model-len=512", "--num-gpu-blocks-override=2", "--block-size=16"], "32"),
    (["--kv-cache-memory-bytes=10"], "10"),
    (["--dtype=int8"], "int8"),
    (["--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize("flags,mention", BAD_STARTS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_is_refused_at_start_in_one_line(flags, mention):
    code, _, stderr = generate_offline(golden_dir(MODEL), *flags, "--prompt-token-ids=5", timeout=30)
    assert code != 0
    said = [line for line in stderr.splitlines() if mention in line]
    assert said, stderr


def refuse_each_other(flags, environment):
    """Two ranks; the second has the flags and the environment. Returns what both say."""
    address = f"unix-abstract:weft-test-join-{os.getpid()}"
    shared = ["--model", golden_dir(MODEL), "-tp", "2", "-dcp", "2", "--local-ranks=2", "--metrics-port=0",
              "--dtype=bfloat16"]
    ranks = [subprocess.Popen([BIN / "weft-worker", *map(str, shared), *own], env=ENV | env, stderr=subprocess.PIPE,
                              text=True)
             for own, env in ((["--rank=0", "--listen", address], {}),
                              (["--rank=1", "--leader-address", address, *flags], environment))]
    try:
        said = []
        for rank in ranks:
            said.append(rank.communicate(timeout=60)[1])
            assert rank.returncode == 78, said[-1]
            assert "all ranks need the same model, layout and flags" in said[-1]
        return said
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_does_not_fit_its_group_is_told_why():
    for err in refuse_each_other(["--kv-cache-dtype=float32"], {}):
        assert "kv_cache_dtype" in err


def test_ranks_on_cpus_that_round_differently_do_not_meet():
    if "avx512_bf16" not in pathlib.Path("/proc/cpuinfo").read_text():
        return  # this CPU rounds nothing
    for err in refuse_each_other([], {"WEFT_CPU_TARGET": "avx2"}):
        assert "inputs of products rounded yes" in err and "inputs of products rounded no" in err


def test_a_rank_does_not_wait_forever_for_a_leader():
    follower = subprocess.run(
        [BIN / "weft-worker", "--model", golden_dir(MODEL), "-tp", "2", "--rank=1", "--join-timeout=100ms",
         "--metrics-port=0", "--leader-address=unix-abstract:weft-test-nobody"], env=ENV, capture_output=True, text=True, timeout=60)
    assert follower.returncode == 70
    assert "no leader at unix-abstract:weft-test-nobody" in follower.stderr


def test_a_port_in_use_is_a_start_up_error(cluster):
    port = cluster.address.rpartition(":")[2]
    out = subprocess.run([BIN / "weft", "serve", golden_dir(MODEL), "--host=127.0.0.1", "--port", port,
                          "--metrics-port=0"], env=ENV, capture_output=True, text=True, timeout=30)
    assert out.returncode != 0 and port in out.stderr


def test_broken_checkpoints_are_refused_as_their_index_says(tmp_path):
    script = golden_dir("break_checkpoint.py")
    subprocess.run(["python3", script, golden_dir("llama_gqa"), tmp_path / "broken"], check=True)
    index = json.loads((tmp_path / "broken/index.json").read_text())
    entries = index if isinstance(index, list) else index.get("variants", index)
    for entry in (entries if isinstance(entries, list) else
                  [{"name": k, **v} for k, v in entries.items()]):
        name, expect, mentions = entry["name"], entry["expect"], entry["mentions"]
        code, lines, stderr = generate_offline(tmp_path / "broken" / name, "-tp", 2, "-dcp", 2,
                                               "--prompt-token-ids=5,6", "--temperature=0", "--max-tokens=2",
                                               timeout=30)
        if expect == "load":
            assert code == 0, (name, stderr)
        elif expect == "reject":
            assert code != 0, name
            assert mentions in stderr, (name, mentions, stderr)
        else:
            assert code != 0 and (mentions in stderr or "error" in lines[0]), (name, stderr)


@pytest.mark.parametrize("flags,env,mentions", [
    (["--kv-cache-memory-bytes=1000TiB"], {}, "--kv-cache-memory-bytes asks for 1024000.00 GiB"),
    (["--num-gpu-blocks-override=2000000000"], {}, "--num-gpu-blocks-override asks for"),
    ([], {"WEFT_CPU_TARGET": "pentium"}, "WEFT_CPU_TARGET is pentium; this CPU allows"),
    (["--config=/dev/zero"], {}, "more than 1048576 bytes"),
], ids=["kv bytes", "blocks", "CPU", "config"])
def test_what_this_machine_cannot_do_is_said_at_the_start(flags, env, mentions):
    out = subprocess.run([BIN / "weft", "generate", "--model", golden_dir("llama_gqa"), "-tp", "2", *flags, "--prompt-token-ids=5"],
                         env={**ENV, **env}, capture_output=True, text=True, timeout=60)
    assert out.returncode == 78 and out.stderr, out.stderr
    assert all(mentions in line for line in out.stderr.splitlines()), out.stderr  # of each rank


@pytest.mark.parametrize("output", ["/dev/full", "a closed pipe"])
def test_work_for_nobody_stops(output):
    """The output cannot be written: what is left of 480 tokens a prompt is not computed."""
    ask = [BIN / "weft", "generate", "--model", golden_dir("llama_gqa"), "-tp", "2", "--prompt-token-ids=5", "--ignore-eos",
           "--max-tokens=480", "--log-level=info"]
    with open(output if output == "/dev/full" else os.devnull, "w") as out:
        process = subprocess.Popen(ask, env=ENV, stdout=subprocess.PIPE if output != "/dev/full" else out,
                                   stderr=subprocess.PIPE, text=True)
        if process.stdout:
            process.stdout.close()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "standard output: " in err
    assert "480 tokens in" not in err


def test_standard_error_that_cannot_be_written_costs_nothing_else():
    with open("/dev/full", "w") as full:
        out = subprocess.run([BIN / "weft", "generate", "--model", golden_dir("llama_gqa"), "-tp", "2", "--prompt-token-ids=5",
                              "--max-tokens=4", "--format=json"], env=ENV, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert out.returncode == 0 and len(json.loads(out.stdout)["token_ids"]) == 4


def test_sigterm_lets_requests_finish():
    flags = ["-tp", 2, "-dcp", 2, "--max-model-len=1K", "--kv-cache-memory-bytes=64MiB"]
    with Cluster(ROOT / "models/smollm2-135m-instruct", *flags) as running:
        client = start(running, max_tokens=100)
        wait_until(lambda: running.status()["num_requests_running"] > 0, 10, "running")
        assert running.stop(timeout=90) == 0
        out, _ = client.communicate(timeout=20)
        assert len(json.loads(out)["token_ids"]) == 100
