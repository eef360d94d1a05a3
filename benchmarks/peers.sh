#!/usr/bin/env bash
# FedAvg here, in Flower's simulation, in Apple's pfl and in BlazeFL, each in an environment of its own below runs/peers (benchmarks/peers.py).
# Usage: benchmarks/peers.sh [options of benchmarks.peers]; PYTHON chooses the interpreter. BlazeFL needs 3.12 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
declare -A needs=([ours]="" [flower]="flwr[simulation]" [pfl]="pfl[pytorch]" [blazefl]="blazefl[contrib,reproducibility]")
for who in ours flower pfl blazefl; do
    env=runs/peers/$who
    if [ ! -e "$env/ready" ]; then
        "$python" -m venv "$env"
        "$env/bin/pip" install --quiet -e . ${needs[$who]} || echo "$who: cannot be installed here; left out" >&2
        "$env/bin/python" -c "import pfl_core" && touch "$env/ready"
    fi
    forms=$who
    if [ "$who" = blazefl ]; then forms="blazefl-threads blazefl-processes"; fi
    for form in $forms; do
        "$env/bin/python" -m benchmarks.peers "$form" "$@" || echo "$form: did not run; left out" >&2
    done
done
