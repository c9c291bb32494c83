#!/bin/bash
# Does a user who logs in have the limits, and the command on the PATH?
set -euo pipefail

login() { su --login --shell /bin/bash nobody --command "$1" 2>/dev/null; }
wrong() {
    echo "$*" >&2
    exit 1
}

locked=$(login 'ulimit -l') files=$(login 'ulimit -Hn')
[[ $locked == unlimited ]] || wrong "a login has $locked kB of locked memory: is pam_limits in /etc/pam.d?"
((files >= 16384)) || wrong "a login has $files open files at most"
login 'hpc-mp --version' || wrong "hpc-mp does not run for a user who logs in"
