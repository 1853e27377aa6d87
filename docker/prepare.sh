#!/bin/sh
# Runs once before the services start: says what will be served, and makes the secrets that only the services know.
set -eu
folder=${1:?the folder of secrets}

if [ "$H3_MODEL" = tiny ]; then
  echo "tiny weights are random: every clip is noise, only the way to it is real"
  echo "the real model, on six GPUs: HF_TOKEN=... H3_MODEL=MiniMaxAI/MiniMax-H3 docker compose run --rm fetch"
  echo "then H3_MODEL=MiniMaxAI/MiniMax-H3 docker compose -f compose.yaml -f docker/compose.gpu.yaml up"
fi

umask 077
# A secret of its own, made once: FILE
make() {
  [ -s "$1" ] && return
  python -c 'import secrets; print(secrets.token_urlsafe(32))' >"$1.new"
  mv "$1.new" "$1"
  echo "made $1"
}
make "$folder/internal-token"
if [ -n "${DATABASE_HOST:-}" ]; then
  make "$folder/database-password"
  echo "postgresql://h3:$(cat "$folder/database-password")@$DATABASE_HOST/h3" >"$folder/database"
fi
