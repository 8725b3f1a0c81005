"""The router's page for people in a real browser (Debian's chromium; scripts/setup_deploy.sh --browser installs it).
With WEFT_STATUSZ_PNG, its picture is kept there."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import matplotlib.image
import numpy
import pytest

from chart import ROOT

sys.path.insert(0, str(ROOT / "deploy"))
from local_cluster import BIN, LocalCluster  # noqa: E402

OPTIONS = {"dtype": "float32", "max-num-seqs": 4, "num-gpu-blocks-override": 24, "block-size": 16,
           "tensor-parallel-size": 2, "decode-context-parallel-size": 2}
VALUES = {
    "models": [{"name": "tiny", "volume": {"hostPath": {"path": "/unused"}}}],
    "groups": [{"name": name, "model": "tiny", "options": OPTIONS} for name in ("a", "b")],
}
BAR_FULL, BAR_EMPTY, READY = (0x3a, 0x6e, 0xa5), (0xe4, 0xe4, 0xea), (0x2e, 0x7d, 0x32)
BAR_WIDTH = 16 * 14  # em of 14 px


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(VALUES, {"tiny": ROOT / "tests/data/llama_mqa"}, tmp_path_factory.mktemp("cluster")) as running:
        running.wait_ready()
        yield running


def browse(url, *flags):
    browser = shutil.which("chromium")
    assert browser, "no chromium: scripts/setup_deploy.sh --browser"
    out = subprocess.run([browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                          "--window-size=1200,620", *flags, url], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    return out.stdout


def pixels(image, color):
    """Where it has that colour."""
    return numpy.all(numpy.abs(255 * image[:, :, :3] - numpy.array(color)) < 1.5, axis=2)


def widest_run(line):
    """Of pixels in a row of the picture."""
    return max((len(run) for run in "".join("x" if p else " " for p in line).split()), default=0)


def test_groups_bars_and_errors_are_seen(cluster, tmp_path):
    subprocess.run([BIN / "weft", "generate", "--address", cluster.address(), "--prompt-token-ids=999999999", "--max-tokens=1"],
                   capture_output=True)
    router = cluster.routers()[0]
    url = f"http://{router.ip}:{router.port('metrics')}/statusz"
    load = subprocess.Popen([BIN / "weft", "bench", "--address", cluster.address(), "--random-input-len=60", "--random-output-len=60",
                             "--num-prompts=100000", "--max-concurrency=8"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    picture = pathlib.Path(os.environ.get("WEFT_STATUSZ_PNG", tmp_path / "statusz.png")).absolute()
    try:
        time.sleep(3)
        page = browse(url, "--dump-dom")
        browse(url, f"--screenshot={picture}")
        assert load.poll() is None, "it was to be under load"
    finally:
        load.terminate()
        load.wait(30)
    assert "2 of 2 groups ready" in page and len(re.findall(r'class="state ready"', page)) == 2
    assert page.count('class="bar"') == 4 and "INVALID_ARGUMENT" in page
    image = matplotlib.image.imread(picture)
    full, empty = pixels(image, BAR_FULL), pixels(image, BAR_EMPTY)
    # Lines of the picture through a bar away from its round corners: a part of it is coloured.
    bars = [f for f, e in zip(map(widest_run, full), map(widest_run, empty)) if f > 0 and abs(f + e - BAR_WIDTH) <= 1]
    assert len(bars) >= 4 * 5, bars
    assert pixels(image, READY).sum() > 200, "the states are seen"
