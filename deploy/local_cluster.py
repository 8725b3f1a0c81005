"""What the chart makes, on this machine: the containers of its pods as processes, a loopback address for each pod,
and Prometheus and alertmanager configured by its PodMonitor and PrometheusRule. For scripts/observe.sh and
tests/deploy.
"""

import ctypes
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
BIN = pathlib.Path(os.environ.get("WEFT_BIN_DIR", ROOT / "build/bin"))
HELM = ROOT / ".deps/deploy/bin/helm"
CHART = ROOT / "deploy/helm/weft"
NAMESPACE, RELEASE = "local", "weft"


def wait_until(condition, timeout, what):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {timeout} s")


def get(address, path, timeout=10):
    """(status, body) of an HTTP GET; status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Pod:
    """One pod of a workload. Its containers share the address `ip`."""

    def __init__(self, name, ip, template, labels):
        self.name, self.ip = name, ip
        self.spec = template["spec"]
        self.labels = {**template["metadata"]["labels"], **labels}
        self.env = {}
        self.processes = {}

    def start(self, names, models, secrets, log):
        """`names`: DNS names and their addresses. `models`: directories by the model's name in the chart.
        `secrets`: likewise of Secrets."""
        secret_of = {v["name"]: v["secret"]["secretName"] for v in self.spec["volumes"] if "secret" in v}
        for container in self.spec["containers"]:
            env = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
            env |= {"UCX_NET_DEVICES": "lo", "PATH": f"{BIN}:{os.environ['PATH']}", **self.env}
            env |= {e["name"]: e["value"] for e in container.get("env", [])}

            def local(text):
                text = re.sub(r"\$\((\w+)\)", lambda m: env[m.group(1)], text).replace("0.0.0.0", self.ip)
                for name, ip in names.items():
                    text = text.replace(name, ip)
                for mount in container["volumeMounts"]:
                    if mount["name"] in secret_of:
                        text = text.replace(mount["mountPath"] + "/", f"{secrets[secret_of[mount['name']]]}/")
                return re.sub(r"^--model=/models/([^/]+)", lambda m: f"--model={models[m.group(1)]}", text)
            command = container["command"] + [local(a) for a in container["args"]]
            self.processes[container["name"]] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)

    def port(self, name):
        return next(p["containerPort"] for c in self.spec["containers"] for p in c["ports"] if p["name"] == name)

    def pids(self):
        return [p.pid for p in self.processes.values()]

    def stop(self, sig=signal.SIGTERM):
        """As kubelet does; the exit codes."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(sig)
        deadline = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes.values()]

    def kill(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


class LocalCluster:
    """The pods of a release, running. Use as a context manager."""

    def __init__(self, values, models, folder, secrets=None):
        out = subprocess.run([HELM, "template", RELEASE, CHART, "-n", NAMESPACE, "-f", "-"], input=json.dumps(values),
                             capture_output=True, text=True, timeout=60)
        if out.returncode != 0:
            raise ValueError(out.stderr)
        self.objects = [o for o in yaml.safe_load_all(out.stdout) if o]
        self.models, self.secrets, self.folder = models, secrets or {}, pathlib.Path(folder)
        # Other clusters on this machine have other networks.
        self.network = f"127.{random.randrange(10, 250)}.{random.randrange(250)}"
        self.pods, self.names = [], {}
        for workload in self.objects:
            if workload["kind"] in ("Deployment", "StatefulSet"):
                self._make_pods(workload)
            elif workload["kind"] == "LeaderWorkerSet":
                self._make_leader_worker_set(workload)
        self.client_flags = []  # of those that ask routers
        self.log = open(self.folder / "pods.log", "w")

    def _make_pod(self, name, template, labels=None):
        self.pods.append(Pod(name, f"{self.network}.{len(self.pods) + 1}", template, labels or {}))
        return self.pods[-1]

    def _dns(self, workload, pod):
        name = workload["metadata"]["name"]
        self.names[f"{pod.name}.{name}.{NAMESPACE}.svc.cluster.local"] = pod.ip

    def _make_pods(self, workload):
        for i in range(workload["spec"].get("replicas", 1)):
            pod = self._make_pod(f"{workload['metadata']['name']}-{i}", workload["spec"]["template"])
            self._dns(workload, pod)

    def _make_leader_worker_set(self, workload):
        spec, name = workload["spec"]["leaderWorkerTemplate"], workload["metadata"]["name"]
        for group in range(workload["spec"].get("replicas", 1)):
            for index in range(spec["size"]):
                pod = self._make_pod(f"{name}-{group}" + (f"-{index}" if index else ""), spec["workerTemplate"],
                                     {"leaderworkerset.sigs.k8s.io/name": name,
                                      "leaderworkerset.sigs.k8s.io/group-index": str(group)})
                if index == 0:
                    leader = pod
                    self._dns(workload, pod)
                pod.env = {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": leader.ip,
                           "LWS_GROUP_SIZE": str(spec["size"])}

    def __enter__(self):
        for pod in self.pods:
            pod.start(self.names, self.models, self.secrets, self.log)
        return self

    def __exit__(self, *_):
        for pod in self.pods:
            pod.kill()
        self.log.close()

    def pod(self, name):
        return next(p for p in self.pods if p.name == name)

    def routers(self):
        return [p for p in self.pods if p.labels["app.kubernetes.io/component"] == "router"]

    def address(self, model=None):
        """Of a router of the model."""
        pod = next(p for p in self.routers() if model in (None, p.labels["weft/model"]))
        return f"{pod.ip}:{pod.port('grpc')}"

    def status(self, address=None):
        """`weft status`, or None while nobody answers."""
        out = subprocess.run([BIN / "weft", "status", "--address", address or self.address(), "--format=json",
                              *self.client_flags], capture_output=True, text=True)
        return json.loads(out.stdout) if out.returncode == 0 else None

    def wait_ready(self, timeout=180):
        def ready():
            infos = [self.status(f"{p.ip}:{p.port('grpc')}") for p in self.routers()]
            return all(i and all(g["ready"] for g in i["groups"]) for i in infos)
        wait_until(ready, timeout, f"all groups ready (see {self.folder}/pods.log)")

    def scrape_configs(self):
        """Of the PodMonitor, as the Prometheus operator makes them of it; the pods are given, not discovered."""
        def snake(name):
            return re.sub("([A-Z])", lambda m: "_" + m.group(1).lower(), name)

        monitor = next(o for o in self.objects if o["kind"] == "PodMonitor")
        configs = []
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            targets = []
            for pod in self.pods:
                ports = {p["name"]: p["containerPort"] for c in pod.spec["containers"] for p in c["ports"]}
                if endpoint["port"] in ports:
                    meta = {"__meta_kubernetes_pod_name": pod.name}
                    meta |= {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value
                             for key, value in pod.labels.items()}
                    targets.append({"targets": [f"{pod.ip}:{ports[endpoint['port']]}"], "labels": meta})
            configs.append({"job_name": f"{monitor['metadata']['name']}/{endpoint['port']}", "static_configs": targets,
                            "relabel_configs": [{snake(k): v for k, v in r.items()} for r in endpoint["relabelings"]]})
        return configs

    def rules(self):
        return next(o for o in self.objects if o["kind"] == "PrometheusRule")["spec"]


class Prometheus:
    """A Prometheus server and an alertmanager of our own. Use as a context manager."""

    def __init__(self, cluster, folder, webhook=None, impatient=False):
        """`impatient`: alerts fire a second after their condition, whatever their `for`."""
        folder = pathlib.Path(folder)
        self.address, self.alertmanager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        rules = json.loads(json.dumps(cluster.rules()))
        for group in rules["groups"] if impatient else []:
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "1s"
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                  "rule_files": [str(folder / "rules.yml")],
                  "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alertmanager]}]}]},
                  "scrape_configs": cluster.scrape_configs()}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        receiver = {"name": "all", **({"webhook_configs": [{"url": webhook}]} if webhook else {})}
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(
            {"route": {"receiver": "all", "group_wait": "1s", "group_by": ["alertname"]}, "receivers": [receiver]}))
        self.log = open(folder / "prometheus.log", "w")
        commands = [
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.address}"],
            ["prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/alerts",
             f"--web.listen-address={self.alertmanager}", "--cluster.listen-address="]]
        self.processes = [subprocess.Popen(c, stdout=self.log, stderr=self.log, preexec_fn=die_with_parent)
                          for c in commands]

    def __enter__(self):
        wait_until(lambda: get(self.address, "/-/ready")[0] == 200, 90, "Prometheus ready")
        wait_until(lambda: get(self.alertmanager, "/-/ready")[0] == 200, 90, "alertmanager ready")
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)
        self.log.close()

    def api(self, path, **query):
        status, body = get(self.address, f"/api/v1/{path}?" + urllib.parse.urlencode(query))
        if status != 200:
            raise ValueError(body)
        return json.loads(body)["data"]

    def query(self, expression):
        """[(labels, value)] of an instant query."""
        result = self.api("query", query=expression)
        return [(r["metric"], float(r["value"][1])) for r in result["result"]]

    def all_up(self, count, timeout=90):
        def up():
            targets = self.api("targets")["activeTargets"]
            return len(targets) == count and all(t["health"] == "up" for t in targets)
        wait_until(up, timeout, f"{count} targets up")
