"""See scripts/observe.sh."""

import argparse
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pictures
from local_cluster import BIN, ROOT, LocalCluster, Prometheus


def values_of(ranks):
    """Two groups that share a cache by position, one of which is handed long prompts by a third."""
    alone = {"threads-per-rank": 1, "kv-cache-memory-bytes": "64MiB"}
    options = {"tensor-parallel-size": ranks, "decode-context-parallel-size": ranks, **alone}
    return {"models": [{"name": "smollm2", "volume": {"hostPath": {"path": "/unused"}}}],
            "router": {"options": {"pd-min-prefill-tokens": 64}},
            "groups": [{"name": "a", "model": "smollm2", "role": "decode", "options": options},
                       {"name": "b", "model": "smollm2", "options": options},
                       {"name": "p", "model": "smollm2", "role": "prefill", "options": alone}],
            "monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}}


def keep_busy(address, stop):
    """Waves of load, so that curves have a shape."""
    def generate(*flags):
        subprocess.run([BIN / "weft", "generate", "--address", address, *flags], capture_output=True)

    while True:
        for concurrency in (2, 8, 16, 4):
            # The same long prompt again, which is cached; and one that is refused.
            generate("--prompt=" + "The same long prompt. " * 60, "--max-tokens=8")
            generate("--prompt=x", "--top-p=2")
            if stop.is_set():
                return
            subprocess.run([BIN / "weft", "bench", "--address", address, "--random-input-len=96", "--random-output-len=24",
                            f"--num-prompts={2 * concurrency}", f"--max-concurrency={concurrency}"], capture_output=True)


def main():
    parser = argparse.ArgumentParser(prog="scripts/observe.sh")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/smollm2-135m-instruct")
    parser.add_argument("--ranks", type=int, default=2, help="of each group but the one that prefills")
    parser.add_argument("--seconds", type=int, help="how long; default: until Ctrl-C")
    parser.add_argument("--pictures", type=pathlib.Path, metavar="DIR", help="at the end, draw the dashboards there")
    arguments = parser.parse_args()
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="weft-observe-") as folder:
        with LocalCluster(values_of(arguments.ranks), {"smollm2": arguments.model}, folder) as cluster:
            cluster.wait_ready()
            with Prometheus(cluster, folder) as prometheus:
                print(f"weft          {cluster.address()}\nPrometheus    http://{prometheus.address}/classic/graph\n"
                      f"alertmanager  http://{prometheus.alertmanager}\nlogs          {folder}/pods.log", flush=True)
                stop = threading.Event()
                threading.Thread(target=keep_busy, args=(cluster.address(), stop), daemon=True).start()
                start = time.time()
                try:
                    time.sleep(arguments.seconds or 10**9)
                except KeyboardInterrupt:
                    pass
                if arguments.pictures:
                    pictures.draw(prometheus, arguments.pictures, start + 10, time.time())
                stop.set()


if __name__ == "__main__":
    main()
