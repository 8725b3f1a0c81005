"""The PromQL of dashboards, rules and autoscalers."""

import json
import re

import yaml

from chart import ROOT

DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
RULE_FILES = sorted((ROOT / "deploy/prometheus").glob("*.yaml"))
# What the programs export.
METRICS = set(re.findall(r'"(weft_\w+)"', (ROOT / "server/metric_table.h").read_text()))


def panels(board):
    return [p for p in board["panels"] if p["type"] != "row"]


def rules():
    return [rule for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def substitute(expression, rate="30s"):
    """With everything selected, as Grafana does."""
    return re.sub(r"\$(cluster|model|group)\b", ".*", expression.replace("$__rate_interval", rate))


def metrics_of(expression):
    """Names of Weft's own metrics in an expression, recorded ones by what they are made of."""
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bweft_\w+", expression)}
    for name in re.findall(r"\b(?:weft|vllm):[\w:]+", expression):
        names |= metrics_of(recorded[name])
    return names


def every_expression():
    """(where, expression) of all dashboards, rules and alerts."""
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
    for rule in rules():
        yield rule.get("record", rule.get("alert")), rule["expr"]
