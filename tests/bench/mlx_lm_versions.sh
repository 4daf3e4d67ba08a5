#!/usr/bin/env bash
# The server's tests with the oldest and the newest mlx-lm that serving claims to work with, each in
# a virtual environment of its own:  bash tests/bench/mlx_lm_versions.sh [VERSION ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in "${@:-0.32.0 0.32.2}"; do
    for v in $version; do
        python3 -m venv "$folder/$v"
        "$folder/$v/bin/pip" install -q '.[cpu,server]' 'pytest>=8' 'hypothesis>=6.100' 'openai>=2' "mlx-lm==$v"
        "$folder/$v/bin/pip" uninstall -q -y dspine-mlx  # the tests run on the checkout
        echo "mlx-lm $v"
        "$folder/$v/bin/python" -m pytest -q tests/test_server*.py
    done
done
