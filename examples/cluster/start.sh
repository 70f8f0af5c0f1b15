#!/bin/bash
# A Ray cluster of machines that share a folder, and a run on it. Each node stays in the foreground: end it with Ctrl-C.
#
#   SHARED=/shared ./start.sh head                               on one machine
#   SHARED=/shared ./start.sh node HEAD_ADDRESS pool=engines     on each other one, with its labels
#   SHARED=/shared ./start.sh train HEAD_ADDRESS --config /shared/run.yaml [key=value ...]
#
# Whoever may speak to Ray's ports can run code, so nodes ask for a token, which the head makes in the shared folder,
# readable by its owner alone. It does not encrypt: keep the ports in a closed network.
set -euo pipefail
: "${SHARED:?is the folder that all machines share, e.g. SHARED=/shared}"
port=${PORT:-6379}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$SHARED/ray_token

role=${1:?is head, node or train}
shift
case $role in
head)
    [ -s "$RAY_AUTH_TOKEN_PATH" ] ||
        (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
    exec ray start --head --port "$port" --num-cpus 0 --labels pool=head --block
    ;;
node)
    exec ray start --address "${1:?is the address of the head}:$port" --labels "${2:?are labels such as pool=cpu}" --block
    ;;
train)
    export RAY_ADDRESS=${1:?is the address of the head}:$port
    shift
    exec python -m raypipe.train "$@"
    ;;
*)
    echo "$role: write head, node or train" >&2
    exit 2
    ;;
esac
