#!/usr/bin/env bash
# Serve TARGET with the EAGLE-3 draft DRAFT: the real SGLang, on CPU cores, one process per tensor-parallel rank.
#
#   demo/serve.sh TARGET DRAFT|none [any argument of sglang.launch_server ...]
#
# Environment: TP (ranks, default 2), PORT (default 30000), PYTHON (default: the repository's .venv, else python3),
# PREFIX_CACHE (any value: keep SGLang's prefix cache). float32, so that tokens can be compared exactly. By default no
# prefix cache, so that a prompt sent twice is computed twice.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 TARGET DRAFT|none [sglang arguments...]" >&2
    exit 2
fi
target=$1 draft=$2
shift 2

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
tp=${TP:-2}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$here/../.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi

# One core for each rank, "0|1|0|1" for four ranks on two cores: SGLang refuses more ranks than NUMA nodes otherwise.
cores=$("$PYTHON" -c '
import itertools, os, sys
cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
print("|".join(str(core) for core in itertools.islice(cores, int(sys.argv[1]))))
' "$tp")

cache=--disable-radix-cache
if [ -n "${PREFIX_CACHE:-}" ]; then cache=; fi

export SGLANG_USE_CPU_ENGINE=1
export SGLANG_CPU_OMP_THREADS_BIND=$cores
export OMP_NUM_THREADS=1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # else gloo looks up the host name, which need not resolve
export SGLANG_NCCL_SO_PATH=/dev/null # a CUDA build of torch brings NCCL, which SGLang would load without a GPU
export PYTHONPATH=$here/sglang_cpu/shim${PYTHONPATH:+:$PYTHONPATH}

speculation=()
if [ "$draft" != none ]; then
    speculation=(--speculative-algorithm EAGLE3 --speculative-draft-model-path "$draft" --speculative-num-steps 3)
    speculation+=(--speculative-eagle-topk 2 --speculative-num-draft-tokens 6)
fi

exec "$PYTHON" -m sglang.launch_server \
    --model-path "$target" \
    "${speculation[@]}" \
    --tp-size "$tp" \
    --device cpu \
    --dtype float32 \
    --attention-backend intel_amx \
    --sampling-backend pytorch \
    --cuda-graph-backend-decode disabled \
    --cuda-graph-backend-prefill disabled \
    --disable-overlap-schedule \
    --disable-custom-all-reduce \
    ${cache:+"$cache"} \
    --max-total-tokens 4096 \
    --mem-fraction-static 0.3 \
    --skip-server-warmup \
    --host 127.0.0.1 \
    --port "${PORT:-30000}" \
    "$@"
