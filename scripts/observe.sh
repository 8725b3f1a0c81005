#!/usr/bin/env bash
# Weft with Prometheus and alertmanager on this machine, as the Helm chart sets them up, under load from `weft bench`;
# prints the addresses. Needs build/bin.
#   scripts/observe.sh [--seconds N] [--pictures DIR] [--model DIR] [--ranks N]
# --pictures draws the dashboards of deploy/grafana at the end, from live queries.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_deploy.sh
scripts/fetch_model.sh
exec .deps/deploy/venv/bin/python deploy/observe.py "$@"
