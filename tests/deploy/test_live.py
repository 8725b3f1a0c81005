"""What the chart makes, as real processes: probes, scrapes, panels, rules and alerts, drains."""

import http.server
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chart import ROOT, of_kind
from queries import DASHBOARDS, METRICS, every_expression, metrics_of, panels, rules, substitute

sys.path.insert(0, str(ROOT / "deploy"))
from local_cluster import BIN, LocalCluster, Prometheus, get, wait_until  # noqa: E402

VALUES = {
    "models": [{"name": "tiny", "volume": {"hostPath": {"path": "/unused"}}}],
    "router": {"replicas": 2, "options": {"max-n": 4, "pd-min-prefill-tokens": 16}},
    "groupDefaults": {"options": {"dtype": "float32", "max-num-seqs": 4}},
    "groups": [
        # Ranks as children of one process; over several nodes; one alone.
        {"name": "a", "model": "tiny", "replicas": 2, "role": "decode",
         # Else weft-worker restarts a group before an alert is due.
         "options": {"tensor-parallel-size": 2, "decode-context-parallel-size": 2, "stall-timeout": "10m"}},
        {"name": "wide", "model": "tiny", "nodes": 2, "options": {"tensor-parallel-size": 2, "decode-context-parallel-size": 2}},
        {"name": "p", "model": "tiny", "role": "prefill"},
        {"name": "one", "model": "tiny", "autoscaling": {"enabled": True, "maxReplicas": 1}},
    ],
    "monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
}
NUM_TARGETS = 2 + 2 * 2 + 2 + 1 + 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(VALUES, {"tiny": ROOT / "tests/data/llama_mqa"}, tmp_path_factory.mktemp("cluster")) as running:
        running.wait_ready()
        yield running


class Webhook(http.server.BaseHTTPRequestHandler):
    alerts = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Webhook.alerts += body["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def prometheus(cluster, tmp_path_factory):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Prometheus(cluster, tmp_path_factory.mktemp("prometheus"), f"http://127.0.0.1:{server.server_port}/",
                    impatient=True) as running:
        running.all_up(NUM_TARGETS)
        yield running
    server.shutdown()


@pytest.fixture(scope="module")
def load(cluster):
    """Requests for as long as tests ask for them; one that is refused now and then."""
    stop = threading.Event()

    def bench():
        while not stop.is_set():
            subprocess.run([BIN / "weft", "bench", "--address", cluster.address(), "--random-input-len=32",
                            "--random-output-len=32", "--num-prompts=64", "--max-concurrency=24"], capture_output=True)
            subprocess.run([BIN / "weft", "generate", "--address", cluster.address(), "--prompt-token-ids=5", "--top-p=2"],
                           capture_output=True)
    thread = threading.Thread(target=bench, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(60)


def grpc_health(pod, probe):
    with grpc.insecure_channel(f"{pod.ip}:{probe['port']}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=probe.get("service", "")), timeout=5)
        except grpc.RpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def passes(pod, container, probe):
    if "grpc" in probe:
        return grpc_health(pod, probe["grpc"]) == "SERVING"
    port = next(p["containerPort"] for p in container["ports"] if p["name"] == probe["httpGet"]["port"])
    return get(f"{pod.ip}:{port}", probe["httpGet"]["path"])[0] == 200


def test_every_probe_passes(cluster):
    for pod in cluster.pods:
        for container in pod.spec["containers"]:
            probes = [key for key in container if key.endswith("Probe")]
            assert {"livenessProbe", "readinessProbe"} <= set(probes)
            for probe in probes:
                assert passes(pod, container, container[probe]), f"{pod.name} {container['name']} {probe}"


def test_every_group_serves(cluster):
    groups = cluster.status()["groups"]
    assert len(groups) == 5 and {len(g["ranks"]) for g in groups} == {1, 2}
    for pod in cluster.routers():
        out = subprocess.run([BIN / "weft", "generate", "--address", f"{pod.ip}:50051", "--prompt-token-ids=5,6,7",
                              "--max-tokens=8", "--format=json"], capture_output=True, text=True, timeout=60)
        assert out.returncode == 0, out.stderr


def test_ranks_of_a_group_have_one_name_wherever_they_are(prometheus):
    ranks = {}
    for labels, _ in prometheus.query("weft_rank_step_id"):
        assert labels["job"] == "weft" and labels["cluster"] == "local/weft" and labels["model_name"] == "tiny"
        ranks.setdefault(labels["group"], set()).add(labels["rank"])
    assert ranks == {"weft-a-0": {"0", "1"}, "weft-a-1": {"0", "1"}, "weft-wide-0": {"0", "1"}, "weft-p-0": {"0"},
                     "weft-one-0": {"0"}}


def test_every_panel_shows_data_under_load(prometheus, load):
    missing = {}

    def all_shown():
        missing.clear()
        for path in DASHBOARDS:
            for panel in panels(json.loads(path.read_text())):
                for target in panel["targets"]:
                    values = [value for _, value in prometheus.query(substitute(target["expr"], rate="15s"))]
                    if not values or any(math.isnan(v) or math.isinf(v) for v in values):
                        missing[f"{path.stem}: {panel['title']}: {target['expr']}"] = values
        return not missing
    try:
        wait_until(all_shown, 180, "data in every panel")
    except AssertionError:
        raise AssertionError(json.dumps(missing, indent=1)) from None


def test_variables_of_dashboards_have_values(prometheus, load):
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if match := re.match(r"label_values\((.*), (\w+)\)$", str(variable.get("query", ""))):
                found = {labels.get(match.group(2)) for labels, _ in prometheus.query(substitute(match.group(1)))}
                assert found and None not in found, f"{path.stem}: {variable['name']}"


def test_every_metric_that_is_named_is_scraped(prometheus, load, cluster):
    names = set(prometheus.api("label/__name__/values"))
    scraped = {re.sub("_(bucket|sum|count)$", "", n) for n in names}
    for where, expression in every_expression():
        assert metrics_of(expression) <= scraped & METRICS, where
    for scaler in of_kind(cluster.objects, "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            name = metric["pods"]["metric"]["name"]
            assert name in names
            # Only leaders have it: its mean over pods is over groups.
            assert all(labels["rank"] == "0" for labels, _ in prometheus.query(f"{name} * on (instance) group_left (rank) weft_rank_step_id"))
    for rule in rules():
        if "record" in rule:
            wait_until(lambda: prometheus.query(rule["record"] if rule["record"].startswith("weft") else
                                                f'{{__name__="{rule["record"]}"}}'), 20, f"{rule['record']} recorded")


def test_rules_evaluate_without_errors(prometheus, load):
    for group in prometheus.api("rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule


def children(pid):
    """{rank: pid} of a supervisor."""
    out = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {match.group(2): int(match.group(1)) for match in re.finditer(r"^ *(\d+) .*--rank=(\d+)", out, re.M)}


def test_a_stopped_rank_rings(cluster, prometheus, load):
    rank = children(cluster.pod("weft-a-0").pids()[0])["1"]
    subprocess.run(["kill", "-STOP", str(rank)], check=True)
    try:
        def told(name, **labels):
            return [a for a in Webhook.alerts if a["labels"]["alertname"] == name and a["status"] == "firing"
                    and labels.items() <= a["labels"].items()]
        wait_until(lambda: told("WeftTargetDown", group="weft-a-0"), 60, "WeftTargetDown at the webhook")
        # Rank 1 says nothing any more; rank 0 waits for it.
        alert = wait_until(lambda: told("WeftRankStalled", group="weft-a-0", rank="0"), 120,
                           "WeftRankStalled at the webhook")[0]
        assert alert["annotations"]["summary"] == "Rank 0 of weft-a-0 stands still with requests running"
    finally:
        subprocess.run(["kill", "-CONT", str(rank)], check=True)
    cluster.wait_ready()


def test_a_killed_rank_is_back_on_the_same_ports(cluster, load):
    pod = cluster.pod("weft-a-1")
    killed = children(pod.pids()[0])["1"]
    subprocess.run(["kill", "-KILL", str(killed)], check=True)
    wait_until(lambda: children(pod.pids()[0]).get("1") not in (None, killed), 60, "rank 1 started again")
    cluster.wait_ready()
    for name in ("metrics-0", "metrics-1"):
        wait_until(lambda: get(f"{pod.ip}:{pod.port(name)}", "/readyz")[0] == 200, 10, f"{name} answers")


def start_request(address, tokens=400):
    return subprocess.Popen([BIN / "weft", "generate", "--address", address, "--prompt-token-ids=5,6,7", "--ignore-eos",
                             f"--max-tokens={tokens}", "--format=json"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Last: they take the cluster down, piece by piece.
def test_a_router_finishes_what_it_has_within_its_grace_period(cluster):
    pod = cluster.routers()[1]
    request = start_request(f"{pod.ip}:50051")
    wait_until(lambda: re.search(r"^weft_router_requests_in_flight{.*} [1-9]", get(f"{pod.ip}:9400", "/metrics")[1], re.M),
               20, "the request in flight")
    start = time.monotonic()
    assert pod.stop() == [0]
    assert time.monotonic() - start < pod.spec["terminationGracePeriodSeconds"] - 5  # preStop comes before
    out, err = request.communicate(timeout=30)
    assert request.returncode == 0, err
    assert len(json.loads(out.splitlines()[-1])["token_ids"]) == 400


@pytest.mark.parametrize("names", [["weft-a-1"], ["weft-wide-0", "weft-wide-0-1"]], ids=["pod", "nodes"])
def test_a_group_ends_within_its_grace_period(cluster, names):
    pods = [cluster.pod(name) for name in names]
    for pod in pods:  # all at once
        for process in pod.processes.values():
            process.send_signal(signal.SIGTERM)
    assert [pod.stop(0) for pod in pods] == [[0]] * len(pods)
    assert start_request(cluster.address(), 8).wait(60) == 0  # the others serve on
