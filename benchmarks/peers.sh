#!/usr/bin/env bash
# FedAvg here, in Flower's simulation and in Apple's pfl, each in an environment of its own below runs/peers (benchmarks/peers.py).
# Usage: benchmarks/peers.sh [options of benchmarks.peers]; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
declare -A needs=([ours]="" [flower]="flwr[simulation]" [pfl]="pfl[pytorch]")
for who in ours flower pfl; do
    env=runs/peers/$who
    if [ ! -e "$env/ready" ]; then
        "$python" -m venv "$env"
        "$env/bin/pip" install --quiet -e . ${needs[$who]} || echo "$who: cannot be installed here; left out" >&2
        "$env/bin/python" -c "import pfl_core" && touch "$env/ready"
    fi
    "$env/bin/python" -m benchmarks.peers "$who" "$@" || echo "$who: did not run; left out" >&2
done
