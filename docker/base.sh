#!/bin/sh
# First layer of both images: no pip, the services' user and the folders that volumes cover.
set -eu

# What installs packages comes with the base image and has no work here.
for name in pip setuptools wheel pkg_resources _distutils_hack; do
  find /usr/lib /usr/local/lib -depth \( -path "*-packages/$name" -o -path "*-packages/$name-*" \) -exec rm -rf {} +
done
rm -rf /usr/share/python-wheels /usr/local/lib/python3*/ensurepip/_bundled
find /usr/bin /usr/local/bin \( -name 'pip' -o -name 'pip3*' -o -name 'wheel' \) -delete

groupadd --gid 10001 h3
useradd --uid 10001 --gid 10001 --home-dir /weights --no-create-home --shell /usr/sbin/nologin --no-log-init h3
# A new named volume takes owner and mode of the folder that it covers.
install -d -o h3 -g h3 -m 0755 /weights
install -d -o h3 -g h3 -m 0700 /state /slab /secrets /shared
