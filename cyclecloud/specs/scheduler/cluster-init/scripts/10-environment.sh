#!/bin/bash
# hpc-mp, once for the whole cluster: an environment on shared storage, which nodes only use. It is built under its final name (an
# environment cannot be moved) and counts when it has its mark; then the link "current" is replaced in one step. Older ones stay:
# jobs that run use them.
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"
: "${CYCLECLOUD_SPEC_PATH:=$CYCLECLOUD_PROJECT_PATH/scheduler}"

place=$(directory)
mkdir -p "$place/bin"
python=$(find_python)
if [[ -z $python ]]; then
    install_python python3.12 || install_python python3.11 || true
    python=$(find_python)
fi
[[ -n $python ]] || die "no Python 3.11 or newer with venv, and none could be installed: put one into the image"

# hpc_mp.requirement is one requirement or several ("hpc-mp==0.1.0 torch==2.11.0"); a wheel in the spec's files stands for hpc-mp.
# Nodes train, so the libraries of the rank half come with it.
read -r -a requirements <<<"$(setting requirement hpc-mp==0.1.0)"
wheels=("$CYCLECLOUD_SPEC_PATH"/files/hpc_mp-*.whl)
if [[ -e ${wheels[0]} ]]; then
    [[ ${#wheels[@]} == 1 ]] || die "several wheels of hpc-mp in $CYCLECLOUD_SPEC_PATH/files: leave one"
    others=()
    for each in "${requirements[@]}"; do [[ $each == hpc[-_]mp* ]] || others+=("$each"); done
    requirements=("${wheels[0]}[train]" "${others[@]}")
    version=$(basename "${wheels[0]}" | cut -d- -f2)
else
    wheels=()
    requirements=("${requirements[@]/#hpc-mp==/hpc-mp[train]==}")
    version=$(grep -oPm1 '^hpc[-_]mp\S*==\K[0-9][\w.+]*' <<<"$(printf '%s\n' "${requirements[@]}")" || echo newest)
fi
index=$(setting torch_index "")
digest=$({ printf '%s\n' "$python" "$index" "${requirements[@]##*/}" && cat "${wheels[@]}" </dev/null; } | sha256sum | cut -c-8)
target=$place/$version-$digest

build() { # TARGET
    rm -rf "$target"
    "$python" -m venv "$target" &&
        "$target/bin/python" -m pip install --no-input --no-cache-dir --disable-pip-version-check --quiet \
            ${index:+--extra-index-url "$index"} "${requirements[@]}" &&
        "$target/bin/python" -c 'import torch, transformers, hpc_mp.cli.main' &&
        "$target/bin/hpc-mp" --version &&
        touch "$target/.complete"
}

link() { # TARGET NAME: replaced in one step
    [[ $(readlink "$2" || true) == "$1" ]] && return
    ln -sfn "$1" "$2.new"
    mv -fT "$2.new" "$2"
    say "$2 is now $1"
}

exec 9>"$place/.lock" # a second scheduler (high availability) waits for the first
flock --wait 1800 9 || die "another machine has built $place for half an hour: see $place/.lock"
if [[ -e $target/.complete ]]; then
    say "$target is there"
elif ! build; then
    rm -rf "$target"
    [[ -x $place/current/bin/hpc-mp ]] || die "pip could not install ${requirements[*]}: see above. Offline, put wheels into an index or on the image (PIP_FIND_LINKS)"
    warn "pip could not install ${requirements[*]}: $(readlink "$place/current") stays"
    exit 0
else
    say "installed ${requirements[*]} in $target"
fi
link "$(basename "$target")" "$place/current"
link ../current/bin/hpc-mp "$place/bin/hpc-mp"

name=$(profile)
if [[ -n $name ]] && ! "$place/bin/hpc-mp" env --profile "$name" >/dev/null; then
    warn "hpc_mp.profile = $name is refused by hpc-mp: jobs will be, too, unless they set environment.profile"
fi
