#!/usr/bin/env bash
# Runs once on every node of a job after its ranks: keeps what tells of a failure, then removes HPC_MP_LOCAL.
#
#   node-end.sh RUN TOKEN done|failed
#
# Kept under RUN/log/nccl/HOST, at most KEEP_BYTES: the ends of NCCL's logs, and flight recorder dumps that fit whole. A
# directory is made only for what is kept: nodes make theirs at the same time, and none may remove what another makes.
# RUN/log/kernel-HOST.log: what kernel and cgroup know of lack of memory and of broken GPUs since node-start.sh.
set -uo pipefail
umask 077

readonly KEEP_BYTES=$((16 << 20))
host=${SLURMD_NODENAME:-$(uname -n)}
run=$1 token=$2 ending=$3
local=${HPC_MP_LOCAL%/}

# Without its token this is another start's directory, or nobody's.
[[ -O $local && ! -L $local && $(head -n 1 -- "$local/.owner" 2>/dev/null) == "$token" ]] || exit 0

keep_dumps() {
    local dump size
    for dump in "$local"/flight/*; do
        [[ -f $dump ]] || continue
        size=$(stat -c %s -- "$dump")
        ((size <= left)) && mkdir -p -- "$kept" && cp -- "$dump" "$kept/" && ((left -= size))
    done
}

keep_logs() {
    local logs=("$local"/nccl.*.log) log
    [[ -f ${logs[0]} ]] && mkdir -p -- "$kept" || return
    for log in "${logs[@]}"; do
        tail -c $((left / ${#logs[@]})) -- "$log" >"$kept/${log##*/}"
    done
}

# dmesg's stamps are seconds since boot, as /proc/uptime counts them; many sites keep dmesg from users.
kernel_words() {
    local since
    since=$(<"$local/.uptime")
    dmesg 2>/dev/null | awk -v since="$since" 'match($0, /[0-9]+\.[0-9]+\]/) && substr($0, RSTART, RLENGTH - 1) + 0 >= since' |
        grep -E 'NVRM: Xid|SXid|oom-kill|Out of memory|Memory cgroup out of memory|Machine check|Hardware Error' | tail -n 200
}

# The job's cgroup counts the processes killed in all of its steps; v2 has memory.events, v1 memory.oom_control.
oom_kills() {
    local path directory
    path=$(sed -n 's/^0:://p; s/^[0-9]*:memory://p' /proc/self/cgroup | tail -n 1)
    directory=${path%/step_*}
    [[ $directory != "$path" ]] || return
    sed -n 's/^oom_kill \([1-9]\)/memory.events oom_kill \1/p' "/sys/fs/cgroup$directory/memory.events" \
        "/sys/fs/cgroup/memory$directory/memory.oom_control" 2>/dev/null
}

if [[ $ending == failed ]]; then
    kept=$run/log/nccl/$host left=$KEEP_BYTES
    keep_dumps
    keep_logs
    words=$(kernel_words; oom_kills)
    [[ -z $words ]] || printf '%s\n' "$words" >"$run/log/kernel-$host.log"
fi
chmod -R u+rwX -- "$local" 2>/dev/null # copies of read-only directories
rm -rf -- "$local"
rmdir -- "${local%/*}" 2>/dev/null
exit 0
