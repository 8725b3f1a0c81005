"""A real Prometheus server scrapes a router and its ranks while they work."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from cluster import BIN, ENV, ROOT, Cluster, free_port, wait_until

TABLE = (ROOT / "server/metric_table.h").read_text()
# name -> kind, from the one table of metrics.
METRICS = {name: kind.lower() for kind, name in
           re.findall(r'(Counter|Gauge|Histogram)Spec k\w+ = \{\s*"(weft_\w+)"', TABLE)}
# Those that only a test of a part of a process moves, and which.
MOVED_ELSEWHERE = {
    "weft_drain_deadline_timestamp_seconds": "tests/e2e/test_metrics.py",
    "weft_router_breaker_open": "tests/router/breaker_test.cc",
    "weft_router_queued_requests": "tests/router/router_metrics_test.cc",
    "weft_router_cached_prompt_tokens_total": "tests/router/router_test.cc",
    "weft_router_prefix_index_blocks": "tests/router/router_test.cc",
    "weft_router_prefix_index_bytes": "tests/router/router_test.cc",
    "weft_router_replays_total": "tests/e2e/test_metrics.py",
    "weft_kv_transfer_bytes_total": "tests/e2e/test_pd.py",
    "weft_kv_transfer_dropped_messages_total": "tests/worker/transfer/kv_mover_test.cc",
    "weft_kv_transfer_expired_total": "tests/worker/engine/kv_handoff_test.cc",
    "weft_kv_transfer_failed_total": "tests/worker/transfer/kv_mover_test.cc",
    "weft_kv_transfer_inflight": "tests/e2e/test_pd.py",
    "weft_kv_transfer_overlapped_bytes_total": "tests/worker/pd_matrix_test.cc",
    "weft_kv_transfer_seconds": "tests/e2e/test_pd.py",
    "weft_router_handoffs_total": "tests/e2e/test_pd.py",
    "weft_router_retries_total": "tests/router/router_metrics_test.cc",
    "weft_stream_buffer_bytes": "tests/server/stream_writer_test.cc",
    "weft_prefix_cache_hits_total": "tests/e2e/test_prefix_cache.py",
    "weft_prefix_cache_evictions_total": "tests/e2e/test_prefix_cache.py",
}
PER_REQUEST = ["weft_e2e_request_latency_seconds", "weft_request_queue_time_seconds",
               "weft_request_prefill_time_seconds", "weft_request_decode_time_seconds",
               "weft_request_prompt_tokens", "weft_request_generation_tokens"]


QUEUED = '{"prompt_token_ids": [5, 6, 8, 9], "max_tokens": 100, "ignore_eos": true, "temperature": 0}\n'
NUM_QUEUED = 60


def get(address, path):
    """(status, body) of an HTTP GET."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def value(address, name):
    """The value that a process tells now of the only series of that name."""
    return float(re.search(rf"^{name}{{.*}} (\S+)$", get(address, "/metrics")[1], re.M).group(1))


def queued(router, stage):
    return int(re.search(rf'weft_router_queued_requests{{.*stage="{stage}"}} (\d+)', get(router, "/metrics")[1]).group(1))


class Prometheus:
    """A Prometheus server of our own that scrapes `targets`, {job: [address]}."""

    def __init__(self, folder, targets):
        self.address = f"127.0.0.1:{free_port()}"
        config = {"global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
                  "scrape_configs": [{"job_name": job, "static_configs": [{"targets": addresses}]}
                                     for job, addresses in targets.items()]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.log = open(folder / "prometheus.log", "w")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.address}"], stdout=self.log, stderr=self.log)

    def api(self, path, **query):
        status, body = get(self.address, f"/api/v1/{path}?" + urllib.parse.urlencode(query))
        assert status == 200, body
        return json.loads(body)["data"]

    def query(self, expression):
        """The values of an instant query, by their labels."""
        return {tuple(sorted(r["metric"].items())): float(r["value"][1])
                for r in self.api("query", query=expression)["result"]}

    def sum(self, expression):
        return sum(self.query(expression).values())

    def all_up(self, count):
        def ready():
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                return get(self.address, "/-/ready")[0] == 200

        def up():
            targets = self.api("targets")["activeTargets"]
            return len(targets) == count and all(t["health"] == "up" for t in targets)
        wait_until(ready, 30, "Prometheus ready")
        wait_until(up, 20, f"{count} targets up")

    def stop(self):
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


def start(cluster, *flags):
    return subprocess.Popen(
        [BIN / "weft", "generate", "--address", cluster.address, "--format=json", "--temperature=0", *flags],
        env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def metrics_addresses(cluster):
    """[router, rank 0, rank 1], of a group of two."""
    out = subprocess.run([BIN / "weft", "status", "--address", cluster.address, "--format=json"],
                         env=ENV, capture_output=True, text=True, check=True)
    info = json.loads(out.stdout)
    wait_until(lambda: len(cluster.status()["ranks"]) == 2, 10, "both ranks told")
    return [info["metrics_address"]] + [rank["metrics_address"] for rank in cluster.status()["ranks"]]


@pytest.fixture(scope="module")
def cluster():
    """Two places, so that most requests wait and the queue lasts for some scrapes."""
    with Cluster(ROOT / "tests/data/llama_mqa", "-tp", 2, "-dcp", 2, "--dtype=float32", "--max-num-seqs=2",
                 "--force-preemption-every=50", "--log-stats-interval=500ms") as running:
        yield running


@pytest.fixture(scope="module")
def targets(cluster):
    """[router, rank 0, rank 1], as `weft status` tells."""
    return metrics_addresses(cluster)


@pytest.fixture(scope="module")
def worked(cluster, targets, tmp_path_factory):
    """Prometheus, after a busy time of the cluster that it has watched."""
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), {"router": targets[:1], "ranks": targets[1:]})
    try:
        prometheus.all_up(3)
        prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
        prompts.write_text(QUEUED * NUM_QUEUED)
        load = start(cluster, f"--prompts-file={prompts}", "--concurrency=1000")
        wait_until(lambda: value(targets[1], "weft_num_requests_waiting") > NUM_QUEUED // 2, 20, "a queue")
        # One that is behind them all when its client dies; one that ends by its stop token; one refused.
        killed = start(cluster, "--prompt-token-ids=5,6,7", "--ignore-eos", "--max-tokens=400")
        wait_until(lambda: value(targets[0], "weft_router_placements_total") == NUM_QUEUED + 1, 20, "all placed")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert load.wait(120) == 0, load.stderr.read()
        answer = cluster.generate("--prompt-token-ids=5,6,7", "--max-tokens=8", "--ignore-eos", "--temperature=0")[0]
        cluster.generate("--prompt-token-ids=5,6,7", "--max-tokens=8", "--temperature=0", "--ignore-eos",
                         f"--stop-token-ids={answer['token_ids'][2]}")
        assert start(cluster, "--prompt-token-ids=5", "--top-p=2").wait(20) == 1
        wait_until(lambda: prometheus.sum('weft_request_success_total{finished_reason="abort"}') == 1, 10, "abort told")
        wait_until(lambda: prometheus.sum("weft_router_requests_total") == NUM_QUEUED + 4, 10, "all told")
        yield prometheus
    finally:
        prometheus.stop()


def test_the_table_is_read_whole():
    assert len(METRICS) == TABLE.count('"weft_') and len(METRICS) >= 30, METRICS
    for name, kind in METRICS.items():
        assert name.endswith("_total") == (kind == "counter"), name


def test_every_metric_is_scraped_and_moves(worked):
    names = set(worked.api("label/__name__/values"))
    for name, kind in METRICS.items():
        if name in MOVED_ELSEWHERE:
            assert (ROOT / MOVED_ELSEWHERE[name]).exists(), name
            # Groups that hand no KV over have no series of it.
            assert name in names or re.match("weft_kv_transfer_|weft_router_handoffs", name), name
            continue
        series = f"{name}_count" if kind == "histogram" else name
        assert series in names, f"{name} was not scraped"
        assert worked.sum(f"max_over_time({series}[5m])") > 0, f"{name} has not moved"
    # Nothing comes that is not in the table.
    unknown = {re.sub("_(bucket|sum|count)$", "", n) for n in names if n.startswith("weft_")} - METRICS.keys()
    assert not unknown


def test_ranks_tell_of_themselves(worked):
    for name in ["weft_rank_step_id", "weft_rank_step_seconds_total", "weft_rank_collective_wait_seconds_total",
                 "weft_rank_fabric_sent_bytes_total",
                 "weft_rank_fabric_received_bytes_total", "weft_rank_collective_received_bytes_total"]:
        by_rank = worked.query(f"max by (rank) ({name})")
        assert len(by_rank) == 2 and all(value > 0 for value in by_rank.values()), (name, by_rank)
    # Both have run every step; they are not scraped at the same moment.
    wait_until(lambda: len(set(worked.query("weft_rank_step_id").values())) == 1, 5, "the same last step")
    waited, stepped = (worked.query(f"max by (rank) (weft_rank_{kind}_seconds_total)") for kind in ("collective_wait", "step"))
    assert all(waited[rank] < stepped[rank] for rank in stepped), (waited, stepped)
    kv = worked.query("max_over_time(weft_rank_kv_tokens[5m])")
    assert len(kv) == 2 and min(kv.values()) > 0
    assert time.time() - worked.sum("max(weft_rank_last_progress_timestamp_seconds)") < 120


def test_per_request_series_count_aborted_requests(worked):
    ended = NUM_QUEUED + 3  # the refused one never came to the engine
    wait_until(lambda: worked.sum("weft_request_success_total") == ended, 5, "all ends scraped")
    assert worked.sum('weft_request_success_total{finished_reason="length"}') == NUM_QUEUED + 1
    assert worked.sum('weft_request_success_total{finished_reason="stop"}') == 1
    for name in PER_REQUEST:
        assert worked.sum(f"{name}_count") == ended, name
    assert worked.sum("weft_request_generation_tokens_sum") == worked.sum("weft_generation_tokens_total")
    assert worked.sum("weft_request_prompt_tokens_sum") == 4 * NUM_QUEUED + 3 * 3
    tokens = worked.sum("weft_generation_tokens_total")
    started = worked.sum("weft_time_to_first_token_seconds_count")
    assert worked.sum("weft_inter_token_latency_seconds_count") == tokens - started  # one gap less than tokens


def test_the_router_tells_how_requests_ended(worked):
    def count(outcome, reason):
        return worked.sum(f'weft_router_requests_total{{outcome="{outcome}",reason="{reason}"}}')
    assert count("OK", "length") == NUM_QUEUED + 1 and count("OK", "stop") == 1
    assert count("CANCELLED", "none") == 1 and count("INVALID_ARGUMENT", "none") == 1
    assert worked.sum('weft_router_rejects_total{reason="INVALID_ARGUMENT"}') == 1
    assert worked.sum("weft_router_placements_total") == NUM_QUEUED + 3
    assert worked.sum("weft_router_requests_in_flight") == 0


@pytest.mark.parametrize("index", [0, 1, 2], ids=["router", "rank0", "rank1"])
def test_promtool_finds_nothing(worked, targets, index):
    status, text = get(targets[index], "/metrics")
    assert status == 200
    lint = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert lint.returncode == 0 and not lint.stdout + lint.stderr, lint.stdout + lint.stderr


def test_the_leader_logs_while_there_is_work_only(worked, cluster):
    lines = [line for line in cluster.log if re.search(r"generation [\d.]+ tokens/s, \d+ running, \d+ waiting", line)]
    assert lines, "no line of what the engine does"
    time.sleep(2.5)
    before = len(cluster.log)
    time.sleep(1.5)
    assert len(cluster.log) == before, cluster.log[before:]


def test_probes_follow_progress_and_readiness(cluster, targets, tmp_path):
    router = targets[0]
    for address in targets:
        assert get(address, "/healthz") == (200, "ok\n")
        assert get(address, "/readyz") == (200, "ok\n")
        assert get(address, "/nothing")[0] == 404
    rank, supervisor = cluster.rank_pids()[1], cluster.supervisor_pid()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(QUEUED * NUM_QUEUED)
    load = start(cluster, f"--prompts-file={prompts}", "--concurrency=1000")
    wait_until(lambda: value(targets[1], "weft_num_requests_running") > 0, 20, "running")
    os.kill(supervisor, signal.SIGSTOP)  # nobody starts the group again, until it is found out after 3 s
    os.kill(rank, signal.SIGKILL)
    # What ran and what is new wait for the group to be ready again.
    wait_until(lambda: value(router, "weft_router_replays_total") > 0, 10, "replayed")
    assert get(router, "/readyz")[0] == 503
    waiting = start(cluster, "--prompt-token-ids=5,6,7", "--max-tokens=2")
    wait_until(lambda: queued(router, "place") == NUM_QUEUED + 1, 10, "all wait for a group")
    assert waiting.wait(60) == 0 and load.wait(60) == 0
    assert get(router, "/readyz")[0] == 200


def test_the_status_page_shows_groups_and_errors(cluster, targets):
    router = targets[0]
    assert start(cluster, "--prompt-token-ids=999999999", "--max-tokens=1").wait(30) == 1
    status, page = get(router, "/statusz")
    assert status == 200 and page.count("class=bar") == 2, page
    assert "1 of 1 groups ready" in page and "<td>INVALID_ARGUMENT</td>" in page


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        out = subprocess.run([BIN / "weft", "serve", ROOT / "tests/data/llama_mqa", "--port=0",
                              f"--metrics-port={port}"], env=ENV, capture_output=True, text=True, timeout=60)
        assert out.returncode == 78, out.stderr
        assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in out.stderr


@pytest.mark.parametrize("who", ["router", "leader"])
def test_a_drain_tells_its_deadline(who):
    """While what it has lasts longer than the drain may."""
    with Cluster(ROOT / "tests/data/llama_mqa", "-tp", 2, "-dcp", 2, "--max-num-seqs=1", "--drain-timeout=5s") as running:
        router, leader, _ = metrics_addresses(running)
        address, pid = (router, running.process.pid) if who == "router" else (leader, int(running.status()["ranks"][0]["pid"]))
        assert value(address, "weft_drain_deadline_timestamp_seconds") == 0
        load = subprocess.Popen([BIN / "weft", "bench", "--address", running.address, "--random-input-len=8",
                                 "--random-output-len=300", "--num-prompts=2000"], env=ENV, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: value(leader, "weft_num_requests_waiting") > 500, 20, "a queue")
            os.kill(pid, signal.SIGTERM)
            told = wait_until(lambda: value(address, "weft_drain_deadline_timestamp_seconds"), 4, "a deadline")
            assert 0 < told - time.time() <= (6 if who == "router" else 31)  # a leader's own is 30 s
        finally:
            load.terminate()
            load.wait(30)


def test_metrics_can_be_off():
    with Cluster(ROOT / "tests/data/llama_mqa", "--metrics-port=-1") as quiet:
        assert "metrics at" not in "".join(quiet.log)
        assert quiet.status()["ranks"][0]["metrics_address"] == ""
