#!/usr/bin/env bash
# The gRPC service from a shell, over server reflection, with a tool that knows nothing of kvferry: examples/shell.sh [HOST:PORT]
# Needs `buf` (pip install buf-bin). Streams an answer, hangs up in the middle, goes on from the next token, and ends another
# answer by a deadline.
set -euo pipefail

command -v buf >/dev/null || { echo "this needs buf, which is not on the PATH: pip install buf-bin" >&2; exit 1; }
address=${1:-127.0.0.1:7070}
streamed=$(mktemp)
trap 'rm -f "$streamed"' EXIT

call() { # METHOD REQUEST
    buf curl --protocol grpc --http2-prior-knowledge --data "$2" "http://$address/kvferry.v1.ChatService/$1"
}
field() { sed -n "s/^ *\"$1\": *\"\\(.*\\)\",*$/\\1/p"; }
n_tokens() { grep -c '"tokenId"' "$streamed" || true; }

session=$(call CreateSession '{}' | field sessionId | head -n 1)
say() { # TURN TEXT MAX_TOKENS SECONDS
    printf '{"sessionId": "%s", "turnId": "%s", "messages": [{"role": "user", "content": "%s"}], "maxTokens": %d, "timeoutSeconds": %s}' \
        "$session" "$1" "$2" "$3" "$4"
}

# A lost connection loses nothing: the turn goes on without a reader, and Resume streams it from any token on.
call Generate "$(say first 'Tell me a long story about a ferry.' 40 0)" |
    awk '{ print } /"tokenId"/ && ++n == 10 { exit }' >"$streamed" || true
seen=$(n_tokens)
echo "[hung up after $seen tokens]"
call Resume "{\"sessionId\": \"$session\", \"turnId\": \"first\", \"fromIndex\": $seen}" >"$streamed"
printf '%b\n' "$(field text <"$streamed" | tr -d '\n')"
echo "[$((seen + $(n_tokens))) tokens, each of them once]"

# The turn's deadline ends the answer with the tokens that it has; the session keeps them.
call Generate "$(say second 'Now a very long one about the sea.' 400 1.5)" >"$streamed"
echo "[the second answer ended with $(field reason <"$streamed" | grep FINISH) after $(n_tokens) tokens]"
