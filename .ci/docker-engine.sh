#!/usr/bin/env bash
# A Docker engine for the container tests, by hand, on a Debian machine that has none and can pull no images.
#   docker-engine.sh up DIR      unpack engine, command line, buildx and compose into DIR, start dockerd, make a stand-in python:3.11-slim
#   docker-engine.sh env DIR     print what a shell exports to use it
#   docker-engine.sh down DIR    stop that dockerd
# Needs root. It touches no firewall, so builds need `network: host`; it has no GPU.
set -euo pipefail
what=${1:?up, env or down}
mkdir -p "${2:?a folder}"
D=$(cd "$2" && pwd)
BASE=python:3.11-slim
export DOCKER_HOST=unix://$D/docker.sock DOCKER_CONFIG=$D/config PATH=$D/root/usr/bin:$D/root/usr/sbin:$PATH

# The engine of the next Debian: this one's is too old for compose files as they are written today.
unpack() {
  local options=(-o DPkg::Lock::Timeout=180 -o "Dir::Etc::sourcelist=$D/next.sources" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$D/lists" -o "Dir::Cache=$D/cache" -o APT::Sandbox::User=root)
  mkdir -p "$D"/{debs,config/cli-plugins,lists/partial,cache/archives/partial}
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=180 install -y -qq --no-install-recommends runc iptables mmdebstrap </dev/null
  sed 's/bookworm/trixie/g' /etc/apt/sources.list.d/debian.sources >"$D/next.sources"
  apt-get "${options[@]}" update -qq
  (cd "$D/debs" && apt-get "${options[@]}" download -qq docker.io/trixie docker-cli docker-buildx docker-compose containerd/trixie tini/trixie)
  for package in "$D"/debs/*.deb; do dpkg -x "$package" "$D/root"; done
  cp "$D"/root/usr/libexec/docker/cli-plugins/* "$D/config/cli-plugins/"
  ln -sf tini-static "$D/root/usr/bin/docker-init"
}

make_base() {
  mmdebstrap --quiet --format=tar --dpkgopt=force-unsafe-io --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='ln -sf /usr/bin/python3 "$1/usr/local/bin/python"; rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
    bookworm "$D/base.part"
  mv "$D/base.part" "$D/base.tar"
}

start() {
  setsid dockerd --data-root "$D/data" --exec-root "$D/run" --pidfile "$D/dockerd.pid" -H "$DOCKER_HOST" --bridge=none \
    --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --storage-driver=overlay2 >"$D/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    docker version >/dev/null 2>&1 && return
    sleep 0.2
  done
  tail -n 5 "$D/dockerd.log" >&2
  return 1
}

stop() {
  local pid
  [ -s "$D/dockerd.pid" ] || return 0
  pid=$(cat "$D/dockerd.pid")
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in $(seq 150); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.2
  done
  return 1
}

case $what in
env) echo "export DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG PATH=$D/root/usr/bin:$D/root/usr/sbin:\$PATH" ;;
down) stop ;;
up)
  [ "$(id -u)" -eq 0 ] || { echo "docker-engine: needs root" >&2; exit 1; }
  [ -r /etc/apt/sources.list.d/debian.sources ] || { echo "docker-engine: only for Debian" >&2; exit 1; }
  if [ ! -x "$D/root/usr/bin/docker-init" ]; then
    trap 'tail -n 3 "$D/apt.log" >&2' EXIT
    unpack >"$D/apt.log" 2>&1
    trap - EXIT
  fi
  [ -s "$D/base.tar" ] || make_base
  docker version >/dev/null 2>&1 || start
  docker version --format 'docker {{.Client.Version}} / {{.Server.Version}}'
  docker image inspect $BASE >/dev/null 2>&1 || docker import \
    -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' -c 'CMD ["python3"]' "$D/base.tar" $BASE >/dev/null ;;
*)
  echo "docker-engine: up, env or down" >&2
  exit 2
  ;;
esac
