#!/bin/sh
# Prints what the running process of a unit was rolled out as; nothing when it does not run. usage: deployed.sh UNIT
set -eu
pid=$(systemctl show --property=MainPID --value "$1")
[ "$pid" -gt 0 ] || exit 0
tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^KVFERRY_DEPLOYED=//p'
