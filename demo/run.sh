#!/usr/bin/env bash
# The main job on a machine without a GPU: the real SGLang at TP=2 serves an EAGLE-3 draft, first wired wrongly, then
# rightly, and eagle-parity tells which is which. Needs what `make setup` installs; `make demo` does both.
#
# Leaves its dumps and reports in demo/work. Exit code 0: the wrong wiring was named and the right one passed.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$here/work
rm -rf "$work"
mkdir -p "$work"
cd "$work"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PORT=$port TP=2

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}
# Run a command that must end with the given exit code.
expect() {
    local want=$1 code=0
    shift
    run "$@" || code=$?
    echo "exit code $code"
    if [ "$code" != "$want" ]; then
        echo "demo: expected exit code $want" >&2
        exit 1
    fi
}

say "1. A tiny target (DeepSeek-V3 architecture with yarn, as in Kimi-K2.5) and an EAGLE-3 draft, trained on [2, 3, 5]"
echo "   config 'wrong' declares ids that make SGLang capture [embed, 2, 4], config 'right' [2, 3, 5]"
run python "$here/models.py" --out models --draft wrong=0,2,4 --draft right=1,2,4

say "2. What the draft was trained on: the Hugging Face forward of the target"
run eagle-parity dump training -o training --model models/target --prompts "$here/prompts.jsonl" --slots 2,3,5 --dtype float32

say "3. What the server feeds the draft: SGLang at TP=2 with the wrong config"
run eagle-parity dump serving -o serving-wrong --tokens-from training --launch -- "$here/serve.sh" models/target models/wrong
expect 1 eagle-parity compare training serving-wrong --report json=compare-wrong.json
expect 1 eagle-parity which-layers --draft models/wrong training serving-wrong

say "4. The same server with the right config, through the deploy gate"
expect 0 env EAGLE_PARITY_GATE_DIR="$work/gate" "$here/../scripts/gate.sh" training models/right --launch -- \
    "$here/serve.sh" models/target models/right

say "The fault was found and named, the healthy server passed. Dumps and reports: demo/work"
