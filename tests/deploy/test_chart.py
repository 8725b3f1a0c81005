"""The chart lints, renders and validates for its examples and random values, and refuses wrong ones."""

import copy
import os
import random
import subprocess
import sys

import pytest
import yaml

from chart import (CHART, EXAMPLES, ROOT, TOOLS, by_name, check_objects, containers, helm, of_kind, pod_template, render,
                   template, validate, workloads)

MINIMAL = {"models": [{"name": "m", "volume": {"hostPath": {"path": "/m"}}}], "groups": [{"name": "g", "model": "m"}]}
# The oldest that the chart supports, and the newest whose schema is there.
VERSIONS = ["1.27", "1.37"]
NUM_RANDOM = 40


def with_group(**values):
    return {**MINIMAL, "groups": [{"name": "g", "model": "m", **values}]}


def with_options(**options):
    return with_group(options={key.replace("_", "-"): value for key, value in options.items()})


def only_group(objects):
    return workloads(objects)[-1] if workloads(objects)[-1]["kind"] != "Deployment" else workloads(objects)[0]


def test_what_is_generated_is_up_to_date():
    out = subprocess.run([sys.executable, ROOT / "deploy/helm/generate.py", "--check"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_lint_and_validate(path):
    lint = helm("lint", "--strict", CHART, "-f", path)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    for version in VERSIONS:
        objects = render(path, "--kube-version", version)
        check_objects(objects)
        for thing in objects:
            validate(thing, version)


def test_an_older_kubernetes_is_refused():
    out = template(MINIMAL, "--kube-version", "1.26")
    assert out.returncode != 0 and "1.27" in out.stderr


def random_values(rng):
    """Values that are allowed, some of each kind."""
    def maybe(**values):
        return {key: value for key, value in values.items() if rng.random() < 0.5}

    models = [{"name": name, **maybe(servedName="a model/of Ours", path="sub/dir"),
               **rng.choice([{"volume": {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}},
                             {"fetch": {"image": "f:1", **maybe(args=["x"], envFrom=[{"secretRef": {"name": "s"}}])}}])}
              for name in rng.sample(["m", "big-one", "x2"], rng.randint(1, 2))]
    groups = []
    for i in range(rng.randint(len(models), 4)):
        nodes, local = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 4, 8])
        ranks = nodes * local
        dcp = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        interleave = rng.choice([1, 4, 16])
        options = {"tensor-parallel-size": ranks, "decode-context-parallel-size": dcp,
                   **maybe(**{"block-size": dcp * interleave * rng.randint(1, 4), "max-model-len": "128k",
                              "dcp-comm-backend": "a2a", "kv-cache-memory-bytes": 1000000000, "async-scheduling": False,
                              "drain-timeout": rng.choice(["90s", "1m30s", "0.5h"]), "max-logprobs": -1})}
        if "block-size" in options:
            options["cp-kv-cache-interleave-size"] = interleave
        if dcp == 1:
            options.pop("cp-kv-cache-interleave-size", None)
        groups.append({"name": f"g{i}", "model": models[i % len(models)]["name"], "nodes": nodes, "options": options,
                       "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Ti", **maybe(cpu=rng.choice([2, "2500m"]))}},
                       **maybe(autoscaling={"enabled": True, "maxReplicas": 3}, replicas=rng.randint(1, 3), shmSize="1Gi", role="both",
                               capabilities=["IPC_LOCK"], env=[{"name": "UCX_TLS", "value": "tcp"}], preStopSeconds=3,
                               nodeSelector={"gpu": "yes"}, podAnnotations={"a": "b"}, podLabels={"c": "d"},
                               tolerations=[{"operator": "Exists"}], priorityClassName="high", runtimeClassName="nvidia",
                               topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone",
                                                           "whenUnsatisfiable": "DoNotSchedule"}])})
    router = maybe(options={"max-n": 4, "queue-timeout": "10s"}, autoscaling={"enabled": True}, replicas=rng.randint(1, 4),
                   service={"type": "LoadBalancer", "port": 443}, podDisruptionBudget={"maxUnavailable": "25%"},
                   tls={"secretName": "t", "verifyClients": rng.random() < 0.5}, apiKeys={"secretName": "keys"})
    return {"models": models, "groups": groups, "router": router,
            **maybe(clusterName="east", image={"repository": "r.example/weft", "tag": "9", "pullSecrets": [{"name": "p"}]},
                    internalTls={"secretName": "inner"}, joinSecret={"secretName": "join"},
                    networkPolicy={"clients": [{"podSelector": {}}]}, serviceAccount={"create": False, "name": "sa"},
                    monitoring={"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True},
                                "dashboards": {"enabled": True}})}


def test_random_values_render_and_validate():
    first = int(os.environ.get("WEFT_SEED", random.randrange(10**6)))
    for seed in range(first, first + NUM_RANDOM):
        rng = random.Random(seed)
        values = random_values(rng)
        try:
            version = rng.choice(VERSIONS)
            objects = render(values, "--kube-version", version)
            check_objects(objects)
            for thing in objects:
                validate(thing, version)
        except Exception:
            print(f"WEFT_SEED={seed}\n{yaml.safe_dump(values)}")
            raise


REFUSED = [
    ({}, "models"),
    ({**MINIMAL, "replicas": 3}, "additional properties 'replicas' not allowed"),
    ({**MINIMAL, "models": [{"name": "m"}]}, "missing property 'volume'"),
    ({**MINIMAL, "models": [{"name": "M", "volume": {"emptyDir": {}}}]}, "does not match pattern"),
    ({**MINIMAL, "models": MINIMAL["models"] * 2}, "models: the name m is there twice"),
    ({**MINIMAL, "groups": MINIMAL["groups"] * 2}, "groups: the name g is there twice"),
    (with_group(model="n"), 'group g: model is "n"; models has m'),
    ({**MINIMAL, "models": MINIMAL["models"] + [{"name": "idle", "volume": {"emptyDir": {}}}]}, "model idle has no group"),
    ({**MINIMAL, "groups": [{"name": "m", "model": "m"}]}, "group m has the name of a model"),
    ({**MINIMAL, "fullnameOverride": "a" * 40, "groups": [{"name": "b" * 40, "model": "m"}]}, "52 are allowed"),
    (with_options(tensor_parallel_size=4, decode_context_parallel_size=3),
     "decode-context-parallel-size is 3; it has to divide tensor-parallel-size, which is 4"),
    (with_options(tensor_parallel_size=0), "minimum: got 0, want 1"),
    (with_options(tensor_parallel_size="two"), "got string, want integer"),
    (with_options(prefill_context_parallel_size=2), "value must be 1"),
    (with_group(nodes=2, options={"tensor-parallel-size": 3}), "nodes is 2; it has to divide tensor-parallel-size, which is 3"),
    (with_options(tensor_parallel_size=4, decode_context_parallel_size=4, block_size=130),
     "block-size is 130; with decode-context-parallel-size 4 and cp-kv-cache-interleave-size 1 it has to be a multiple of 4: 132"),
    (with_options(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=128, cp_kv_cache_interleave_size=48),
     "multiple of 96: 192"),
    (with_options(tensor_paralel_size=2), "additional properties 'tensor-paralel-size' not allowed"),
    (with_options(listen="x"), "additional properties 'listen' not allowed"),
    (with_options(dtype="int3"), "value must be one of"),
    (with_options(drain_timeout="inf"), "drain-timeout"),
    (with_options(drain_timeout=30), "got number, want string"),
    (with_options(kv_cache_memory_bytes="2 gigs"), "kv-cache-memory-bytes"),
    (with_options(tensor_parallel_size=2, kv_cache_memory_bytes="2GiB"),
     "resources.limits.memory is 4Gi; kv-cache-memory-bytes 2GiB of 2 ranks alone is 4.0 GiB"),
    (with_group(resources={"limits": {"memory": "8Gigs"}}), "memory"),
    (with_group(resources={"limits": {"nvidia.com/gpu": 4}}, options={"tensor-parallel-size": 8}),
     "nvidia.com/gpu is 4; a container has 8 ranks"),
    (with_group(replicas=0, autoscaling={"enabled": True}), "group g: replicas is 0 and autoscaling enabled"),
    (with_group(autoscaling={"enabled": True, "minReplicas": 5, "maxReplicas": 4}),
     "autoscaling.minReplicas is 5; at most maxReplicas, which is 4"),
    (with_group(autoscaling={"enabled": True, "minReplicas": 0}), "minimum: got 0, want 1"),
    (with_group(terminationGracePeriodSeconds=35),
     "terminationGracePeriodSeconds is 35; preStopSeconds 0 and drain-timeout 30s need more than 35"),
    ({**MINIMAL, "router": {"terminationGracePeriodSeconds": 30}}, "preStopSeconds 5 and drain-timeout 30s need more than 35"),
    ({**MINIMAL, "router": {"options": {"groups": "a:1"}}}, "additional properties 'groups' not allowed"),
    ({**MINIMAL, "networkPolicy": {"prometheus": []}}, "minItems"),
    (with_group(role="Prefill"), "value must be one of"),
    (with_group(role="prefill"), "model m has a group with role prefill, and none with decode or both"),
    (with_group(role="both", options={"kv-transfer-config": "{}"}), "role sets kv-transfer-config; give one of them"),
    ({**MINIMAL, "router": {"tls": {"verifyClients": True}}}, "router.tls: verifyClients is true and secretName empty"),
    ({**MINIMAL, "router": {"tls": {"secretName": "A B"}}}, "does not match pattern"),
    ({**MINIMAL, "router": {"apiKeys": {"secretName": "k", "key": "../k"}}}, "does not match pattern"),
    ({**MINIMAL, "router": {"options": {"ssl-keyfile": "/k"}}}, "additional properties 'ssl-keyfile' not allowed"),
    (with_options(join_secret_file="/j"), "additional properties 'join-secret-file' not allowed"),
]


@pytest.mark.parametrize("values,message", REFUSED, ids=[m for _, m in REFUSED])
def test_wrong_values_are_refused(values, message):
    out = template(values)
    assert out.returncode != 0, "rendered"
    assert message in out.stderr, out.stderr


@pytest.mark.parametrize("values", [
    with_group(terminationGracePeriodSeconds=36),
    with_options(tensor_parallel_size=1, block_size=130, cp_kv_cache_interleave_size=48),  # I is ignored with N = 1
    with_options(tensor_parallel_size=2, kv_cache_memory_bytes="2047MiB"),
    with_group(replicas=0),
], ids=["grace", "block", "memory", "replicas"])
def test_what_is_just_right_is_taken(values):
    check_objects(render(values))


def test_the_grace_period_follows_the_drain_timeout():
    spec = pod_template(only_group(render(with_options(drain_timeout="1m30.2s"))))["spec"]
    assert spec["terminationGracePeriodSeconds"] == 91 + 10


def test_threads_follow_the_cpu_limit():
    def arguments(cpu, ranks, nodes=1):
        group = with_group(options={"tensor-parallel-size": ranks}, nodes=nodes,
                           resources={"limits": {"cpu": cpu} if cpu else {}})
        return containers(only_group(render(group)))[0]["args"]
    assert "--threads-per-rank=4" in arguments(8, 2)
    assert "--threads-per-rank=1" in arguments("2500m", 2)
    assert "--threads-per-rank=1" in arguments("500m", 2)
    assert "--threads-per-rank=8" in arguments(8, 2, nodes=2)  # the limit is of each rank's container
    assert not any("threads" in a for a in arguments(None, 2))


def test_big_numbers_stay_integers():
    args = containers(only_group(render(with_options(kv_cache_memory_bytes=2000000000, max_allowed_token_ids=1048576))))[0]["args"]
    assert "--kv-cache-memory-bytes=2000000000" in args and "--max-allowed-token-ids=1048576" in args


def test_shm_follows_the_layout():
    def size(**values):
        volumes = pod_template(only_group(render(with_group(**values))))["spec"]["volumes"]
        return next(v for v in volumes if v["name"] == "shm")["emptyDir"]["sizeLimit"]
    assert size(options={"tensor-parallel-size": 8}) == "320Mi"
    assert size(options={"tensor-parallel-size": 8}, nodes=4) == "128Mi"
    assert size(shmSize="1Gi") == "1Gi"


def test_routers_know_every_group_an_autoscaler_may_make():
    values = copy.deepcopy(MINIMAL)
    values["groups"] = [{"name": "a", "model": "m", "replicas": 2},
                        {"name": "b", "model": "m", "autoscaling": {"enabled": True, "maxReplicas": 3}}]
    router = by_name(render(values), "Deployment", "w-weft-m")
    groups = next(a for a in containers(router)[0]["args"] if a.startswith("--groups="))
    assert groups.removeprefix("--groups=").split(",") == [
        f"w-weft-{n}-{i}.w-weft-{n}.prod.svc.cluster.local:50052" for n, i in
        [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]]


def test_only_routers_reach_leaders_and_only_ranks_each_other():
    objects = render({**MINIMAL, "groups": [{"name": "g", "model": "m", "nodes": 2, "options": {"tensor-parallel-size": 4}}]})
    policy = by_name(objects, "NetworkPolicy", "w-weft-g")["spec"]
    grpc, metrics, ranks = policy["ingress"]
    assert grpc["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    assert [p["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for p in grpc["from"]] == ["router"]
    assert metrics["ports"] == [{"port": 9401, "endPort": 9402, "protocol": "TCP"}]
    assert [list(p) for p in metrics["from"]] == [["namespaceSelector"]]
    assert ranks["from"] == [{"podSelector": policy["podSelector"]}] and "ports" not in ranks


def test_roles_are_flags_and_open_the_data_ports_between_groups_of_a_model():
    values = {"models": MINIMAL["models"] + [{"name": "n", "volume": {"emptyDir": {}}}],
              "groups": [{"name": "p", "model": "m", "role": "prefill"}, {"name": "d", "model": "m", "role": "decode"},
                         {"name": "o", "model": "n"}]}
    objects = render(values)
    for group, role in (("p", "kv_producer"), ("d", "kv_consumer")):
        assert f'--kv-transfer-config={{"kv_role":"{role}"}}' in containers(by_name(objects, "StatefulSet", f"w-weft-{group}"))[0]["args"]
        peers = by_name(objects, "NetworkPolicy", f"w-weft-{group}")["spec"]["ingress"][2]
        assert peers == {"from": [{"podSelector": {"matchLabels": {
            "app.kubernetes.io/name": "weft", "app.kubernetes.io/instance": "w", "app.kubernetes.io/component": "group",
            "weft/model": "m"}}}]}
    assert len(by_name(objects, "NetworkPolicy", "w-weft-o")["spec"]["ingress"]) == 2


def secret_mounts(workload):
    """{mountPath: Secret} of the first container; all of a workload's containers have the same."""
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod_template(workload)["spec"]["volumes"] if "secret" in v}
    mounts = [{m["mountPath"]: secrets[m["name"]] for m in c["volumeMounts"] if m["name"] in secrets}
              for c in containers(workload)]
    assert all(m == mounts[0] for m in mounts)
    return mounts[0]


def test_secrets_are_mounted_where_flags_point_and_only_where_they_are_needed():
    values = {**MINIMAL, "groups": [{"name": "g", "model": "m"}, {"name": "wide", "model": "m", "nodes": 2,
                                                                 "options": {"tensor-parallel-size": 4}}],
              "router": {"tls": {"secretName": "outer", "verifyClients": True}, "apiKeys": {"secretName": "keys", "key": "k.json"}},
              "internalTls": {"secretName": "inner"}, "joinSecret": {"secretName": "join"}}
    objects = render(values)
    router = by_name(objects, "Deployment", "w-weft-m")
    pods = {"router": router, "g": by_name(objects, "StatefulSet", "w-weft-g"), "wide": by_name(objects, "LeaderWorkerSet", "w-weft-wide")}
    assert {name: secret_mounts(pod) for name, pod in pods.items()} == {
        "router": {"/etc/weft/tls": "outer", "/etc/weft/api-keys": "keys", "/etc/weft/internal-tls": "inner"},
        "g": {"/etc/weft/internal-tls": "inner"},
        "wide": {"/etc/weft/internal-tls": "inner", "/etc/weft/join": "join"}}
    for pod in pods.values():
        for container in containers(pod):
            files = [a.partition("=")[2] for a in container["args"] if "/etc/weft/" in a]
            assert {f.rpartition("/")[0] for f in files} == set(secret_mounts(pod))
    # kubelet's gRPC probes speak no TLS, and nobody else's h2c works.
    container = containers(router)[0]
    assert all("httpGet" in container[probe] for probe in container if probe.endswith("Probe"))
    assert not any("appProtocol" in port for o in of_kind(objects, "Service") for port in o["spec"]["ports"])
    plain = render(values | {"router": {}, "internalTls": {}, "joinSecret": {}})
    assert not any(secret_mounts(w) for w in workloads(plain))
    assert all("appProtocol" in port for o in of_kind(plain, "Service") for port in o["spec"]["ports"])


def test_a_package_holds_rules_and_dashboards(tmp_path):
    out = helm("package", CHART, "-d", tmp_path)
    assert out.returncode == 0, out.stderr
    names = subprocess.run(["tar", "tzf", *tmp_path.glob("*.tgz")], capture_output=True, text=True, check=True).stdout
    for source in [*(ROOT / "deploy/prometheus").glob("*.yaml"), *(ROOT / "deploy/grafana").glob("*.json")]:
        assert f"/{source.name}\n" in names, source
    assert ".png" not in names and ".py\n" not in names


def test_no_secret_is_in_an_argument_and_notes_say_where_to_go():
    out = template(MINIMAL, "--show-only", "templates/NOTES.txt")
    notes = helm("install", "w", CHART, "--dry-run=client", "-f", EXAMPLES[0])
    assert "weft.v1.Inference" in notes.stdout, notes.stderr + out.stderr


# checkov's findings that stay, and why.
JUSTIFIED = {
    "CKV_K8S_21": "the namespace is the release's",
    "CKV_K8S_43": "images are named by tag here; a digest is a tag of the user's",
    "CKV_K8S_15": "IfNotPresent suits versioned tags",
    "CKV_K8S_11": "a CPU limit throttles spinning ranks into stalls; the user sets one together with threads",
    "CKV_K8S_35": "the fetch container's environment is the user's choice",
}


def test_checkov_finds_nothing_unjustified(tmp_path):
    for path in EXAMPLES:
        (tmp_path / f"{path.stem}.yaml").write_text(yaml.safe_dump_all(render(path)))
    out = subprocess.run([TOOLS.parent / "checkov/bin/checkov", "-d", tmp_path, "--framework", "kubernetes", "--compact",
                          "--quiet", "--skip-download", "--skip-check", ",".join(JUSTIFIED)],
                         capture_output=True, text=True, env={**os.environ, "LOG_LEVEL": "ERROR"}, timeout=300)
    assert out.returncode == 0, out.stdout + out.stderr
