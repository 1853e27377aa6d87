#!/bin/sh
# As PostgreSQL's own image starts: the first time it makes the database, with the password that a file has; then it serves, not as root.
set -eu
data=/var/lib/postgresql/data

install -d -o postgres -g postgres /var/run/postgresql
as_postgres() { setpriv --reuid=postgres --regid=postgres --init-groups "$@"; }

if [ ! -s "$data/PG_VERSION" ]; then
  password=$(cat "$POSTGRES_PASSWORD_FILE")
  install -d -o postgres -g postgres -m 0700 "$data"
  as_postgres initdb -D "$data" -U "$POSTGRES_USER" -E utf8 --auth-local=trust --auth-host=scram-sha-256 >/dev/null
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  # By its socket alone until it is whole.
  as_postgres pg_ctl -D "$data" -w -s -o "-c listen_addresses= -k /var/run/postgresql" start
  psql -q -U "$POSTGRES_USER" -d postgres -v "password=$password" <<SQL
ALTER USER "$POSTGRES_USER" PASSWORD :'password';
CREATE DATABASE "$POSTGRES_DB";
SQL
  as_postgres pg_ctl -D "$data" -w -s -m fast stop
fi
exec setpriv --reuid=postgres --regid=postgres --init-groups postgres -D "$data" -c 'listen_addresses=*' -k /var/run/postgresql
