#!/usr/bin/env bash
# An elastic server on the nodes of a Ray cluster: docs/elastic.md, "Several machines".
#
#   launch/recipes/ray/serve.sh head          1. on the machine that clients will call
#   launch/recipes/ray/serve.sh node HOST     2. on every other one; HOST is the head's address
#   launch/recipes/ray/serve.sh serve 2       3. on the head: a server on up to 2 devices, one a node
#
# The same checkout, model and adapters at the same paths everywhere. Nothing is encrypted between
# the nodes, and whoever reaches Ray's ports can join in: only in a network that you trust.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly PYTHON=${PYTHON:-.venv/bin/python}
readonly RAY_PORT=6379

ray() { "$PYTHON" -m ray.scripts.scripts "$@"; }

case "${1:-}" in
head)
    ray start --head --port="$RAY_PORT"
    ;;
node)
    ray start --address="${2:?the address of the head}:$RAY_PORT"
    ;;
serve)
    exec "$PYTHON" -m sgl_esft.launch_server --elastic --nodes ray \
        --max-devices "${2:?how many devices}" --dp-size 1 --port "${PORT:-30000}" \
        ${MODEL:+--model-path "$MODEL"} ${ADAPTERS:+--adapter-root "$ADAPTERS"}
    ;;
*)
    echo "usage: serve.sh head | node HOST | serve DEVICES" >&2
    exit 2
    ;;
esac
