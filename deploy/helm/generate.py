#!/usr/bin/env python3
"""Writes what of the chart follows from something else: in weft/values.schema.json the flags that the
programs have (from their --help), and weft/README.md (from the comments of values.yaml).

    deploy/helm/generate.py [--check]    needs build/bin; --check writes nothing and exits 1 on a difference
"""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("WEFT_BIN_DIR", ROOT / "build/bin"))
CHART = ROOT / "deploy/helm/weft"
# The chart sets these itself.
OWNED = {"model", "served-model-name", "host", "port", "listen", "groups", "metrics-host", "metrics-port",
         "rank", "local-ranks", "leader-address", "config", "print-config", "version",
         "ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "worker-ssl-certfile", "worker-ssl-keyfile",
         "worker-ssl-ca-certs", "api-keys-file", "join-secret-file"}
FLAG = re.compile(r"^  (?:-\w,)?--([\w-]+)(?:,\S+)?(?: ([A-Z]+|[\w-]+(?:\|[\w-]+)+))?(?:\s+(.*))?$")


def schema_of(kind, help_text):
    schema = {"description": help_text}
    if kind is None:
        return schema | {"type": "boolean"}
    if "|" in kind:
        return schema | {"enum": kind.split("|")}
    if kind == "BYTES":
        return schema | {"$ref": "#/$defs/bytes"}
    if kind == "DURATION":
        return schema | {"$ref": "#/$defs/duration"}
    if kind == "NUMBER":
        return schema | {"type": "number"}
    return schema | {"type": ["string", "integer"]}


def options_of(program):
    """{flag: schema} of a program's --help."""
    text = subprocess.run([BIN / program, "--help"], capture_output=True, text=True, check=True).stdout
    options, last = {}, None
    for line in text.splitlines():
        if match := FLAG.match(line):
            last = match.group(1)
            options[last] = [match.group(2), match.group(3) or ""]
        elif last and line.startswith(" " * 20):
            options[last][1] += (" " if options[last][1] else "") + line.strip()
        else:
            last = None
    # With --simulate a router does not serve.
    return {name: schema_of(*rest) for name, rest in sorted(options.items())
            if name not in OWNED and not name.startswith("simulate")}


def schema():
    tree = json.loads((CHART / "values.schema.json").read_text())
    for definition, program in (("routerOptions", "weft-router"), ("groupOptions", "weft-worker")):
        tree["$defs"][definition] = {"type": "object", "additionalProperties": False,
                                     "properties": options_of(program)}
    tree["$defs"]["groupOptions"]["properties"]["prefill-context-parallel-size"] = {"const": 1}
    for name in ("tensor-parallel-size", "decode-context-parallel-size", "block-size",
                 "cp-kv-cache-interleave-size"):
        tree["$defs"]["groupOptions"]["properties"][name] |= {"type": "integer", "minimum": 1}
    # The grace period follows from it.
    for definition in ("routerOptions", "groupOptions"):
        tree["$defs"][definition]["properties"]["drain-timeout"] |= {"not": {"const": "inf"}}
    return json.dumps(tree, indent=2) + "\n"


def values():
    """(name, default, text) of each value that has a comment, or no children."""
    path, comment = [], []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := re.match(r"^\s*# (-- )?(.*)", line):
            comment = [match.group(2)] if match.group(1) else comment + [match.group(2)] if comment else []
        elif match := re.match(r"^(\s*)([\w-]+):(?: (.*))?$", line):
            depth = len(match.group(1)) // 2
            path = path[:depth] + [match.group(2)]
            if comment or match.group(3):
                yield ".".join(path), match.group(3) or "", " ".join(comment)
            comment = []


def readme():
    def cell(text):
        return text.replace("|", "\\|")

    lines = [f"| `{name}` | {f'`{cell(default)}`' if default else ''} | {cell(text)} |"
             for name, default, text in values()]
    head = (CHART / "README.md").read_text().split("| value | default |")[0]
    return head + "| value | default | |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def main():
    different = False
    for name, text in (("values.schema.json", schema()), ("README.md", readme())):
        if (CHART / name).read_text() == text:
            continue
        different = True
        if "--check" in sys.argv:
            print(f"deploy/helm/weft/{name} is not what deploy/helm/generate.py writes: run it", file=sys.stderr)
        else:
            (CHART / name).write_text(text)
    return 1 if different and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
