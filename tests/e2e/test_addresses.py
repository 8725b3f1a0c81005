"""Leaders with names, as pods have them: a name may come later, and have another address later."""

import json
import os
import subprocess

import pytest

from cluster import BIN, ENV, ROOT, wait_until

MODEL = ROOT / "tests/data/llama_mqa"
NAME = "leader.weft-test.svc"
NETWORK = f"127.77.{os.getpid() % 250}"
ROUTER = f"{NETWORK}.1:50051"


def start(program, *arguments, names=None):
    """`names`: a file that this process has for /etc/hosts."""
    command = [str(BIN / program), str(MODEL), "--metrics-port=-1", *arguments]
    if names is not None:
        command = ["unshare", "-m", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh", *command]
    return subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL)


def ready():
    out = subprocess.run([BIN / "weft", "status", "--address", ROUTER, "--format=json"], env=ENV, capture_output=True, text=True)
    return out.returncode == 0 and json.loads(out.stdout)["groups"][0]["ready"]


@pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ,
                    reason="only root can give a process an /etc/hosts of its own")
def test_a_leader_is_found_when_its_name_comes_and_when_its_address_changes(tmp_path):
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    processes = [start("weft-router", f"--listen={ROUTER}", f"--groups={NAME}:50052", names=names)]
    try:
        for host in (2, 3):
            address = f"{NETWORK}.{host}"
            processes.append(start("weft-worker", "--dtype=float32", f"--listen={address}:50052"))
            names.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")
            # Sooner than gRPC by itself, which asks for a name every 30 s.
            wait_until(ready, 27, f"ready at {address}")
            processes[-1].terminate()
            processes[-1].wait(20)
            wait_until(lambda: not ready(), 10, "its loss noticed")
    finally:
        for process in processes:
            process.terminate()
            process.wait(40)
