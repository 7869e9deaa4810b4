#!/usr/bin/env bash
# One machine, from the checkout: makes keys once, then serves on 127.0.0.1 until Ctrl-C or SIGTERM.
#
#   MODEL=/srv/models/base ADAPTERS=/srv/adapters launch/recipes/one_machine.sh --max-adapters 8
#
# Without MODEL it serves the demo. STATE holds the keys; further arguments go to the launcher.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly PYTHON=${PYTHON:-.venv/bin/python}
readonly STATE=${STATE:-$HOME/.sgl-esft}

new_key() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

[ -x "$PYTHON" ] || make setup

umask 077 # the server refuses keys that others can read
mkdir -p "$STATE"
[ -e "$STATE/admin.key" ] || new_key >"$STATE/admin.key"
[ -e "$STATE/keys.json" ] ||
    printf '{"keys": [{"name": "client", "key": "%s"}]}\n' "$(new_key)" >"$STATE/keys.json"
ADMIN_KEY=$(cat "$STATE/admin.key")
export ADMIN_KEY
echo "one_machine.sh: keys are in $STATE"

exec "$PYTHON" -m sgl_esft.launch_server --port "${PORT:-30000}" \
    --api-keys-file "$STATE/keys.json" --admin-key-env ADMIN_KEY --enable-metrics \
    ${MODEL:+--model-path "$MODEL"} ${ADAPTERS:+--adapter-root "$ADAPTERS"} "$@"
