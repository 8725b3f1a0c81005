"""Dashboards: generated, complete, and of Grafana's own types."""

import json
import re
import subprocess
import sys

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard
import promql_parser

from chart import ROOT
from queries import DASHBOARDS, METRICS, metrics_of, panels, substitute

register_default_plugins()


def test_what_is_generated_is_up_to_date():
    out = subprocess.run([sys.executable, ROOT / "deploy/grafana/generate.py", "--check"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_decoding_and_encoding_loses_nothing(path):
    text = path.read_text()
    decoded = dashboard.Dashboard.from_json(json.loads(text))
    assert json.loads(JSONEncoder(sort_keys=True).encode(decoded)) == json.loads(text)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_panels_say_what_they_show(path):
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem and board["description"]
    names = [v["name"] for v in board["templating"]["list"]]
    for panel in panels(board):
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(names), f"{panel['title']}: {used}"
            promql_parser.parse(substitute(target["expr"]))


def test_the_overview_and_the_others_leave_out_no_metric():
    """Every metric of the programs is in some panel, so that nothing has to be looked for by hand."""
    shown = {m for path in DASHBOARDS for p in panels(json.loads(path.read_text())) for t in p["targets"]
             for m in metrics_of(t["expr"])}
    assert METRICS - shown == set()
