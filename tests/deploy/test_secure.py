"""TLS on every hop, API keys and the join secret, as the chart wires them, with real processes."""

import json
import subprocess
import sys

import pytest

from chart import ROOT

sys.path.insert(0, str(ROOT / "deploy"))
from local_cluster import BIN, LocalCluster, get  # noqa: E402

TWO_RANKS = {"tensor-parallel-size": 2, "decode-context-parallel-size": 2}
VALUES = {
    "models": [{"name": "tiny", "volume": {"hostPath": {"path": "/unused"}}}],
    "router": {"replicas": 1, "tls": {"secretName": "outer", "verifyClients": True}, "apiKeys": {"secretName": "keys"}},
    "internalTls": {"secretName": "inner"},
    "joinSecret": {"secretName": "join"},
    "groupDefaults": {"options": {"dtype": "float32"}},
    "groups": [{"name": "a", "model": "tiny", "options": TWO_RANKS},
               {"name": "wide", "model": "tiny", "nodes": 2, "options": TWO_RANKS}],
}
KEY = "sk-0123456789abcdef0123456789abcdef"


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_tls_secret(folder, addresses):
    """What a Secret of type kubernetes.io/tls holds, with its CA: one certificate for all."""
    folder.mkdir()
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=ca",
            "-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=weft",
            "-keyout", folder / "tls.key", "-out", folder / "tls.csr")
    (folder / "ext").write_text("subjectAltName=" + ",".join(f"IP:{a}" for a in addresses) + "\n")
    openssl("x509", "-req", "-in", folder / "tls.csr", "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", folder / "ext", "-out", folder / "tls.crt")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    secrets = {name: folder / name for name in ("outer", "inner", "keys", "join")}
    made = LocalCluster(VALUES, {"tiny": ROOT / "tests/data/llama_mqa"}, folder, secrets)
    for name in ("outer", "inner"):
        make_tls_secret(secrets[name], [pod.ip for pod in made.pods])
    for name, file, text in (("keys", "api-keys.json", json.dumps({"tenants": [{"name": "a", "api_keys": [KEY]}]})),
                             ("join", "join-secret", "s" * 64)):
        secrets[name].mkdir()
        (secrets[name] / file).write_text(text)
        (secrets[name] / file).chmod(0o400)
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o400)
    made.client_flags = [f"--ssl-ca-certs={secrets['outer']}/ca.crt", f"--ssl-certfile={secrets['outer']}/tls.crt",
                         f"--ssl-keyfile={secrets['outer']}/tls.key", f"--api-key-file={folder}/key"]
    with made as running:
        running.wait_ready()
        yield running


def generate(cluster, *flags):
    return subprocess.run([BIN / "weft", "generate", "--address", cluster.address(), "--prompt-token-ids=5,6", "--max-tokens=4",
                           *flags], capture_output=True, text=True, timeout=60)


def test_who_has_certificate_and_key_is_served(cluster):
    out = generate(cluster, *cluster.client_flags)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("left_out", ["ssl-ca-certs", "ssl-certfile", "api-key-file"])
def test_who_lacks_one_of_them_is_not(cluster, left_out):
    flags = [f for f in cluster.client_flags
             if left_out not in f and not (left_out == "ssl-certfile" and "ssl-keyfile" in f)]
    assert generate(cluster, *flags).returncode != 0


def test_probes_need_neither(cluster):
    for pod in cluster.pods:
        for container in pod.spec["containers"]:
            port = next(p["containerPort"] for p in container["ports"] if p["name"].startswith("metrics"))
            for probe in (container[p] for p in container if p.endswith("Probe")):
                assert get(f"{pod.ip}:{port}", probe["httpGet"]["path"])[0] == 200, (pod.name, probe)


def test_no_secret_is_in_an_argument_or_the_environment(cluster):
    for pod in cluster.pods:
        for pid in pod.pids():
            seen = open(f"/proc/{pid}/cmdline").read() + open(f"/proc/{pid}/environ").read()
            assert KEY not in seen and "s" * 64 not in seen
