"""The Helm chart, rendered, and checks of what it makes that no schema makes."""

import json
import os
import pathlib
import re
import subprocess

import cloudcoil.models.prometheus_operator.v1 as operator
import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("WEFT_BIN_DIR", ROOT / "build/bin"))
TOOLS = ROOT / ".deps/deploy/bin"
CHART = ROOT / "deploy/helm/weft"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
LWS_SCHEMA = json.loads((pathlib.Path(__file__).parent / "leaderworkerset.schema.json").read_text())

QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")
DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")
PORT_NAME = re.compile(r"^(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$")


def helm(*arguments):
    return subprocess.run([TOOLS / "helm", *arguments], capture_output=True, text=True, timeout=60)


def template(values, *flags, release="w", namespace="prod"):
    """`helm template` with a dict of values, or the path of a file."""
    if isinstance(values, dict):
        out = subprocess.run([TOOLS / "helm", "template", release, CHART, "-n", namespace, "-f", "-", *flags],
                             input=json.dumps(values), capture_output=True, text=True, timeout=60)
    else:
        out = helm("template", release, CHART, "-n", namespace, "-f", values, *flags)
    return out


def render(values, *flags, **names):
    """The objects, as dicts."""
    out = template(values, *flags, **names)
    assert out.returncode == 0, out.stderr
    return [o for o in yaml.safe_load_all(out.stdout) if o]


def of_kind(objects, *kinds):
    return [o for o in objects if o["kind"] in kinds]


def by_name(objects, kind, name):
    found = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: there are {len(found)}"
    return found[0]


def pod_template(workload):
    if workload["kind"] == "LeaderWorkerSet":
        return workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return workload["spec"]["template"]


def workloads(objects):
    return of_kind(objects, "Deployment", "StatefulSet", "LeaderWorkerSet")


def containers(workload):
    spec = pod_template(workload)["spec"]
    return spec["containers"] + spec.get("initContainers", [])


def validate(thing, version):
    """Against the schemas of Kubernetes `version`, or of the operator that owns the kind."""
    if thing["apiVersion"].startswith("monitoring.coreos.com/"):
        model = getattr(operator, thing["kind"])
        model.model_validate(thing)
        unknown = unknown_fields(thing, model.model_validate(thing).model_dump(by_alias=True, exclude_none=True))
        assert not unknown, f"{thing['kind']}: unknown fields {unknown}"
    elif thing["kind"] == "LeaderWorkerSet":
        jsonschema.validate(thing, LWS_SCHEMA)
        # Its pods are made by StatefulSets.
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                  "spec": pod_template(thing)["spec"]}, version)
    else:
        kubernetes_validate.validate(thing, version, strict=True)


def unknown_fields(given, known, path=""):
    """What a model that ignores unknown fields has ignored."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [p for key, value in given.items() if value is not None
                for p in ([f"{path}.{key}"] if key not in known else unknown_fields(value, known[key], f"{path}.{key}"))]
    if isinstance(given, list) and isinstance(known, list):
        return [p for i, (a, b) in enumerate(zip(given, known)) for p in unknown_fields(a, b, f"{path}[{i}]")]
    return []


def selects(selector, labels):
    return selector and all(labels.get(key) == value for key, value in selector.items())


def check_containers(workload):
    spec = pod_template(workload)["spec"]
    volumes = {v["name"] for v in spec["volumes"]}
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    numbers = [p["containerPort"] for c in spec["containers"] for p in c.get("ports", [])]
    assert len(numbers) == len(set(numbers)), f"two containers of a pod listen on one port: {numbers}"
    for container in containers(workload):
        assert container["securityContext"]["readOnlyRootFilesystem"], container["name"]
        assert {m["name"] for m in container["volumeMounts"]} <= volumes
        for kind in ("requests", "limits"):
            for resource, quantity in container["resources"].get(kind, {}).items():
                assert QUANTITY.match(str(quantity)), f"{resource}: {quantity}"
        ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
        assert all(PORT_NAME.match(name) for name in ports), ports
        assert all(p["protocol"] == "TCP" for p in container.get("ports", []))
        for probe in (container[p] for p in container if p.endswith("Probe")):
            port = probe["httpGet"]["port"] if "httpGet" in probe else probe["grpc"]["port"]
            assert port in (ports.keys() if isinstance(port, str) else ports.values()), port
        for argument in container.get("args", []):
            assert isinstance(argument, str), argument
    sleeps = [int(c["lifecycle"]["preStop"]["exec"]["command"][1]) for c in containers(workload) if "lifecycle" in c]
    assert spec["terminationGracePeriodSeconds"] > max(sleeps, default=0)


def check_objects(objects):
    """Names, selectors, ports, budgets and autoscalers, of everything together."""
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names)), names
    for kind, name in names:
        assert DNS_LABEL.match(name), f"{kind} {name}"
    accounts = {o["metadata"]["name"] for o in of_kind(objects, "ServiceAccount")}
    pods = {}
    for workload in workloads(objects):
        check_containers(workload)
        metadata, spec = pod_template(workload)["metadata"], pod_template(workload)["spec"]
        pods[workload["metadata"]["name"]] = (metadata["labels"], [p for c in spec["containers"] for p in c["ports"]])
        assert not accounts or spec["serviceAccountName"] in accounts
        if workload["kind"] != "LeaderWorkerSet":
            assert selects(workload["spec"]["selector"]["matchLabels"], metadata["labels"])
        for constraint in spec.get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"]["matchLabels"], metadata["labels"])
        # Whoever owns the number of replicas, there is one owner and a budget.
        name = workload["metadata"]["name"]
        scalers = [o for o in of_kind(objects, "HorizontalPodAutoscaler") if o["spec"]["scaleTargetRef"]["name"] == name]
        assert len(scalers) + ("replicas" in workload["spec"]) == 1, name
        for scaler in scalers:
            target = scaler["spec"]["scaleTargetRef"]
            assert (target["kind"], target["apiVersion"]) == (workload["kind"], workload["apiVersion"])
            assert 1 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]
        assert workload["kind"] != "StatefulSet" or by_name(objects, "Service", workload["spec"]["serviceName"])
    for thing in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = thing["spec"]
        selector = spec.get("podSelector", spec["selector"] if "selector" in spec else None)
        selector = selector.get("matchLabels", selector)
        chosen = [name for name, (labels, _) in pods.items() if selects(selector, labels)]
        assert len(chosen) == 1, f"{thing['kind']} {thing['metadata']['name']} selects {chosen}"
        port_names = {p["name"] for p in pods[chosen[0]][1]}
        for port in spec.get("ports", []):
            assert port["targetPort"] in port_names and port["protocol"] == "TCP"
        for rule in spec.get("ingress", []):
            for port in rule.get("ports", []):
                assert port["protocol"] == "TCP"
                assert port["port"] in port_names | {p["containerPort"] for p in pods[chosen[0]][1]}
            for peer in rule.get("from", []):
                own = peer.get("podSelector", {}).get("matchLabels")
                assert own is None or any(selects(own, labels) for labels, _ in pods.values()), own
    for monitor in of_kind(objects, "PodMonitor"):
        endpoints = {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]}
        metrics = {p["name"] for _, ports in pods.values() for p in ports if p["name"].startswith("metrics")}
        assert metrics == endpoints
        assert all(selects(monitor["spec"]["selector"]["matchLabels"], labels) for labels, _ in pods.values())
