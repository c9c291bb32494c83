#!/bin/bash
# What the scripts of all specs share. CycleCloud puts each spec into a directory of its own below $CYCLECLOUD_PROJECT_PATH; the spec
# "default" is on every node and comes first, so the others find this file there.
# shellcheck disable=SC2034 # "changed" is for the scripts
set -euo pipefail
umask 022 # hardened images have 027: users could not read what root writes here

jetpack=${JETPACK_HOME:-${CYCLECLOUD_HOME:-/opt/cycle/jetpack}}/bin/jetpack

say() { echo "hpc-mp ${0##*/}: $*"; }

warn() { # goes on; CycleCloud's event log shows it
    say "WARNING: $*" >&2
    "$jetpack" log "hpc-mp ${0##*/}: $*" --level=warn --priority=medium || true
}

die() { # the node fails: only for what makes it useless
    say "ERROR: $*" >&2
    "$jetpack" log "hpc-mp ${0##*/}: $*" --level=error --priority=high || true
    exit 1
}

setting() { # NAME DEFAULT: hpc_mp.NAME of the cluster's template
    "$jetpack" config "hpc_mp.$1" "$2"
}

enabled() { # NAME: hpc_mp.NAME, which is true unless the template says otherwise
    local value
    value=$(setting "$1" true)
    case ${value,,} in
    true | yes | on | 1) return 0 ;;
    false | no | off | 0) return 1 ;;
    esac
    warn "hpc_mp.$1 = $value is neither true nor false: taken as true"
}

directory() { # where the shared environments are
    local place
    place=$(setting directory /shared/hpc-mp)
    [[ $place == /?* ]] || die "hpc_mp.directory = $place is no absolute path"
    echo "${place%/}"
}

profile() { # the environment profile; empty: none
    local name
    name=$(setting profile "")
    [[ $name =~ ^[a-z0-9-]*$ ]] || die "hpc_mp.profile = $name is no name of a profile: see env/profiles"
    echo "$name"
}

changed=no # "yes" once put, drop or block has changed something

put() { # FILE MODE: standard input becomes FILE, whole or not at all; one that is the same is not touched
    local file=$1 mode=$2 folder new
    folder=$(dirname "$file")
    mkdir -p "$folder"
    # In the folder above: of some folders every file is read or run, a half-written one too.
    new=$(mktemp "$(dirname "$folder")/.hpc-mp.XXXXXX")
    cat >"$new"
    chmod "$mode" "$new"
    if cmp -s "$new" "$file" && [[ $(stat -c %a "$file") == "$mode" ]]; then
        rm "$new"
        return
    fi
    mv -f "$new" "$file"
    changed=yes
    say "wrote $file"
}

drop() { # FILE…: removed where they are
    local file
    for file; do
        [[ -e $file || -L $file ]] || continue
        rm -f "$file"
        changed=yes
        say "removed $file"
    done
}

block() { # FILE NAME: standard input becomes a marked block of FILE, in place of the one of that name; empty: none
    # Blocks stand at the end, where Slurm's last word is, in the order in which they came: a second run moves none.
    local file=$1 begin="# >>> hpc-mp $2" end="# <<< hpc-mp $2" text new
    text=$(cat)
    [[ -z $text ]] || text="$begin: written by cluster-init, change the cluster's settings instead"$'\n'"$text"$'\n'"$end"$'\n'
    new=$(mktemp "$file.XXXXXX")
    cp --preserve=mode,ownership "$file" "$new"
    name=$2 text=$text awk '/^# >>> hpc-mp / { inside = 1; block = $4; sub(/:$/, "", block); order[++count] = block }
        inside { blocks[count] = blocks[count] $0 "\n" } !inside { print } /^# <<< hpc-mp / { inside = 0 }
        END { for (at = 1; at <= count; at++) {
                  if (order[at] != ENVIRON["name"]) printf "%s", blocks[at]
                  else if (!put++) printf "%s", ENVIRON["text"] }
              if (!put) printf "%s", ENVIRON["text"] }' "$file" >"$new"
    if cmp -s "$new" "$file"; then
        rm "$new"
        return
    fi
    mv -f "$new" "$file"
    changed=yes
    say "changed $file"
}

outside() { # FILE NAME: its lines without that block
    awk -v name="hpc-mp $2" '$0 ~ "^# >>> " name "(:|$)" { skip = 1 } !skip { print } $0 == "# <<< " name { skip = 0 }' "$1"
}

slurm_directory() { # where cyclecloud-slurm keeps what all nodes share: /sched/CLUSTER
    [[ -e /etc/slurm/slurm.conf ]] || die "no /etc/slurm/slurm.conf: in the template the specs of cyclecloud/slurm must come before those of hpc-mp"
    dirname "$(readlink -f /etc/slurm/slurm.conf)"
}

last_value() { # KEY FILE…: what Slurm takes of a key that stands in several files or lines
    local key=$1
    shift
    awk -v key="${key,,}" '{ at = index($0, "="); name = tolower(substr($0, 1, at - 1)); gsub(/[ \t]/, "", name) }
        at && name == key { value = substr($0, at + 1) } END { gsub(/^[ \t"]+|[ \t"]+$/, "", value); print value }' "$@"
}

find_python() { # the newest Python that hpc-mp runs on and that can make environments; nothing: there is none
    local python
    for python in /usr/bin/python3.{14,13,12,11} /usr/local/bin/python3.{14,13,12,11}; do
        if [[ -x $python ]] && "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

install_python() { # NAME: python3.11, from the distribution
    local name=$1
    say "installing $name"
    if command -v apt-get >/dev/null; then
        timeout 300 apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends "$name" "$name-venv"
    elif command -v dnf >/dev/null; then
        timeout 600 dnf install -y -q "$name"
    elif command -v tdnf >/dev/null; then
        timeout 600 tdnf install -y python3
    else
        return 1
    fi
}
