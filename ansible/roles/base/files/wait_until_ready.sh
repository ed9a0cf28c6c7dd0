#!/bin/sh
# ExecStartPost of a service: ends well when the service has written its ready file, and badly when the service is gone.
# usage: wait_until_ready.sh FILE; systemd gives MAINPID, and ends us after TimeoutStartSec.
set -eu
until [ -s "$1" ]; do
    kill -0 "${MAINPID:?is given by systemd}" 2>/dev/null || exit 1
    sleep 0.1
done
