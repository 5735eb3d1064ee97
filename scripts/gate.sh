#!/usr/bin/env bash
# Pre-deploy gate: capture what the server feeds the draft, compare it with training, stop the deploy if it differs.
#
#   scripts/gate.sh TRAINING DRAFT --launch -- python -m sglang.launch_server --model-path … --tp 8 …
#   scripts/gate.sh TRAINING DRAFT --server http://127.0.0.1:30000 --capture-dir /dev/shm/eagle-parity
#
# TRAINING: training dump. DRAFT: draft checkpoint. The rest goes to `eagle-parity dump serving`.
# Environment: EAGLE_PARITY_GATE_DIR keeps the serving dump and report.json there (default: a temporary directory).
# Exit code: 0 deploy; 1 parity failed; 2 usage or unreadable input; 3 inconclusive; 4 environment; 130 interrupted.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
training=$1 draft=$2
shift 2

if [ -n "${EAGLE_PARITY_GATE_DIR:-}" ]; then
    work=$EAGLE_PARITY_GATE_DIR
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi

eagle-parity dump serving -o "$work/serving" --overwrite --tokens-from "$training" "$@" >&2
eagle-parity gate "$training" "$work/serving" --draft "$draft" --report "json=$work/report.json"
