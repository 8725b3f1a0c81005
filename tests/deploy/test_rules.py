"""Rules and alerts: well formed, each with a test, and every alert says what to do."""

import re
import subprocess

import yaml

from chart import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
RULES = [rule for path in PROMETHEUS.glob("*.yaml") for group in yaml.safe_load(path.read_text())["groups"]
         for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
TESTS = "".join(path.read_text() for path in (PROMETHEUS / "tests").glob("*.yaml"))


def test_promtool_takes_the_rules():
    out = subprocess.run(["promtool", "check", "rules", *PROMETHEUS.glob("*.yaml")], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_the_rules_do_what_their_tests_say():
    out = subprocess.run(["promtool", "test", "rules", *(PROMETHEUS / "tests").glob("*.yaml")], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_every_alert_has_a_test_in_which_it_fires():
    assert len(ALERTS) >= 10
    for alert in ALERTS:
        assert re.search(rf'ALERTS{{alertname="{alert["alert"]}", alertstate="firing", \w', TESTS), alert["alert"]


def test_every_alert_says_what_to_do():
    for alert in ALERTS:
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}, alert["alert"]
        assert alert["labels"]["severity"] in ("page", "ticket")
