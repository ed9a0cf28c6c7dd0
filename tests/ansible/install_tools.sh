#!/bin/sh
# Installs what the board tests need beyond Python, on Debian and Ubuntu. Needs root; touches nothing that is there already.
set -eu
missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need ip iproute2
need nsenter util-linux
need systemd-nspawn systemd-container
need systemd-analyze systemd
need mmdebstrap mmdebstrap
need ssh openssh-client
need ssh-keygen openssh-client
[ -z "$missing" ] && exit 0
[ "$(id -u)" -eq 0 ] || { echo "missing:$missing (install them, or run as root)" >&2; exit 1; }
apt-get update -qq
# shellcheck disable=SC2086 - a list of words
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
