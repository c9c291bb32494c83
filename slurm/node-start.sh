#!/usr/bin/env bash
# Runs once on every node of a job before its ranks: is the run directory there, and what lies on the local disk?
#
#   node-start.sh RUN TOKEN [--health PYTHON] [--gpus] [--environment ARCHIVE PREFIX] [--copy PATH]…
#
# HPC_MP_LOCAL names the directory to make on this node's own disk, BASE/hpc-mp-UID/JOB; its parent and itself are ours
# alone. In it: cache/ and tmp/, env/ (the environment, or a link to PREFIX where there is no room), data/ (copies, each
# under its whole path, a link where there is no room; hpc_mp/rundir/staged.py reads them). Facts of the node go to RUN/nodes/HOST.json.
# Whatever is there already is left as it is: a second call is quick.
#
# Exits 0, or 2 after one line on stderr with host, value and remedy. What cannot be staged is a warning: ranks then read
# the shared copy, which is slower and right.
set -uo pipefail
umask 077

readonly placeholder='@HPC_MP_PREFIX@' # stands for the place of the environment in the files of ARCHIVE's .relocate
host=${SLURMD_NODENAME:-$(uname -n)}
run=$1 token=$2
local=${HPC_MP_LOCAL%/}
staged=$local/data
shift 2

warn() { printf 'hpc-mp: %s: warning: %s\n' "$host" "$1" >&2; }
refuse() {
    printf 'hpc-mp: %s: %s\n' "$host" "$1" >&2
    exit 2
}

# The file system may show a new file late (NFS keeps names for up to a minute): ask again, reading the directory anew.
visible() {
    local deadline=$((SECONDS + ${HPC_MP_PATIENCE:-60}))
    until grep -qsF -- "\"token\": \"$token\"" "$run/attempt.json"; do
        ((SECONDS < deadline)) || return 1
        sleep 1
        ls -- "$run" >/dev/null 2>&1
    done
}

# A directory that nobody else can have prepared for us.
private() {
    mkdir -m 700 -- "$1" 2>/dev/null
    [[ ! -L $1 ]] || refuse "$1 is a symbolic link: remove it, or set environment.local to another directory"
    [[ -d $1 ]] || refuse "$1 cannot be made: set environment.local to a directory on the node's own disk that you may write"
    [[ -O $1 ]] || refuse "$1 belongs to somebody else: set environment.local to another directory"
    chmod 700 -- "$1"
}

# Whether a rank of that start lives on this node.
lives() { grep -qszxF -- "HPC_MP_TOKEN=$1" /proc/[0-9]*/environ; }
remove() {
    chmod -R u+rwX -- "$1" # copies of read-only directories
    rm -rf -- "$1"
}

# What earlier attempts of this run left on this node, and what lies where this one is to be.
clean() {
    local other owner
    for other in "${local%/*}"/*; do
        [[ -O $other && ! -L $other && -f $other/.owner ]] || continue
        owner=$(head -n 1 -- "$other/.owner")
        if [[ $other == "$local" ]]; then
            [[ $owner == "$token" ]] && continue
            lives "$owner" && refuse "$local is in use by attempt $owner: end that run, or set environment.local in one of them"
            remove "$other"
        elif [[ $(tail -n +2 -- "$other/.owner") == "$run" ]]; then
            lives "$owner" || remove "$other"
        fi
    done
}

free_bytes() { echo $(($(stat -f -c '%a*%S' -- "$1"))); }
gib() { awk -v bytes="$1" 'BEGIN { printf "%.1f GiB", bytes / 2^30 }'; }
json() { printf '"%s"' "$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')"; }

# Whether so many bytes fit, with some to spare for caches and logs; what for, if not.
fits() {
    local free
    free=$(free_bytes "$local")
    (($1 + (1 << 28) <= free)) && return
    warn "$2 needs $(gib "$1") on $local, where $(gib "$free") are free"
    return 1
}

unpack() {
    case $1 in
        *.tar.zst) zstd -dcq -- "$1" | tar -C "$2" -xf - ;;
        *) tar -C "$2" -xf "$1" ;;
    esac
}

# Give the files that name their own place (pyvenv.cfg, first lines of scripts) the new one.
relocate() {
    local file place
    place=$(printf '%s' "$2" | sed 's/[&|\\]/\\&/g')
    while IFS= read -r -d '' file; do
        sed -i "s|$placeholder|$place|g" "$1/$file" || return
    done <"$1/.relocate"
}

stage_environment() {
    local archive=$1 prefix=$2 env=$local/env part=$local/.env.$$ bytes
    [[ -e $env ]] && return
    if read -r bytes <"$archive.bytes" && fits "$bytes" "the Python environment" && mkdir -- "$part" \
        && unpack "$archive" "$part" && relocate "$part" "$env" && mv -T -- "$part" "$env"; then
        "$env/bin/python" -I -c '' && return
        rm -rf -- "$env"
    fi
    rm -rf -- "$part"
    warn "the Python environment is not staged: ranks of this node read $prefix"
    ln -s -- "$prefix" "$env"
}

# The marker says which files of which size a complete copy holds; Python takes the same lock (flock) and writes the same.
stage_copy() {
    local source=$1 target=$staged$1 part bytes
    mkdir -p -- "$(dirname -- "$target")" || return
    (
        flock 9
        [[ -f $target.staged ]] && exit
        part=$target.part
        rm -rf -- "$part" "$target"
        bytes=$(du -sbL -- "$source" | cut -f 1)
        if [[ $bytes ]] && fits "$bytes" "$source" && cp -RL --preserve=timestamps -- "$source" "$part" \
            && find "$part" -type f -printf '%s %P\0' >"$target.listed" \
            && mv -T -- "$part" "$target" && mv -- "$target.listed" "$target.staged"; then
            exit
        fi
        rm -rf -- "$part" "$target.listed"
        ln -s -- "$source" "$target" # a program looks here, whatever became of the copy
        warn "$source is not staged: ranks of this node read it where it is"
    ) 9>>"$target.lock"
}

# Models of the GPUs that this job may use here, one per line; nothing where there is no nvidia-smi.
gpu_models() {
    local listed
    command -v nvidia-smi >/dev/null || return 0
    listed=$(timeout 60 nvidia-smi -L 2>&1) || refuse "nvidia-smi fails ($(head -n 1 <<<"$listed")): leave this node out"
    if [[ $listed =~ (MIG [^:]*): ]]; then
        refuse "the GPU is cut into slices (${BASH_REMATCH[1]}): ranks need whole GPUs, ask for nodes without MIG"
    fi
    sed -n 's/^GPU [0-9]*: \(.*\) (UUID.*/\1/p' <<<"$listed"
}

# What the doctor finds wrong with this node or with the network that NCCL takes on it; what it cannot see, or a doctor that
# fails, keeps no node out. It takes 5 s, and where there are GPUs and a fast network 60 s more at most.
health() {
    local said
    said=$(timeout 90 "$1" -P -m hpc_mp.doctor.gate 2>/dev/null)
    [[ $? != 1 || -z $said ]] || refuse "$(head -n 3 <<<"$said" | paste -sd ';'): leave this node out, or set environment.health = false"
}

facts() {
    local model models='' comma=''
    while IFS= read -r model; do
        [[ $model ]] && models+="$comma$(json "$model")" && comma=', '
    done <<<"$1"
    printf '{"host": %s, "token": %s, "boot_id": %s, "kernel": %s, "gpus": [%s], "local": %s, "local_free_bytes": %s}\n' \
        "$(json "$host")" "$(json "$token")" "$(json "$(</proc/sys/kernel/random/boot_id)")" "$(json "$(uname -r)")" \
        "$models" "$(json "$local")" "$(free_bytes "$local")"
}

visible || refuse "the run directory $run cannot be seen, or holds another start's attempt.json: put job.directory on a \
file system that all nodes share"
{ mkdir -p -- "$run/nodes" && : >"$run/nodes/.$host"; } 2>/dev/null ||
    refuse "the run directory $run cannot be written: check its file system's quota and mount on this node"

mkdir -p -- "${local%/*/*}" 2>/dev/null
private "${local%/*}"
clean
private "$local"
printf '%s\n%s\n' "$token" "$run" >"$local/.owner" ||
    refuse "$local cannot be written ($(gib "$(free_bytes "$local")") free): set environment.local to another disk"
mkdir -p -- "$local"/{cache/{huggingface,triton,inductor,cuda,xdg},tmp,flight,data}
read -r uptime _ </proc/uptime
[[ -f $local/.uptime ]] || printf '%s\n' "$uptime" >"$local/.uptime"

models=''
while (($#)); do
    case $1 in
        --health) health "$2"; shift 2 ;;
        --gpus) models=$(gpu_models) || exit; shift ;;
        --environment) stage_environment "$2" "$3"; shift 3 ;;
        --copy) stage_copy "$2"; shift 2 ;;
        *) refuse "node-start.sh does not know $1" ;;
    esac
done

facts "$models" >"$run/nodes/.$host" && mv -f -- "$run/nodes/.$host" "$run/nodes/$host.json"
