#!/bin/bash
# What users find: the command on their PATH, and the platform's environment profile for what they launch. /etc/nccl.conf is the
# image's and stays as it is: the profile decides for a job what of it counts (hpc-mp env shows it).
# shellcheck source=../../../default/cluster-init/files/common.sh
source "${CYCLECLOUD_PROJECT_PATH:=$(cd "$(dirname "$0")/../.." && pwd)}/default/files/common.sh"

place=$(directory)
profile=$(profile)

# Behind PATH, and a folder with this one command: neither its python nor its pip may stand in for the user's own.
put /etc/profile.d/hpc-mp.sh 644 <<END
# Written by the cluster-init of hpc-mp.
case ":\$PATH:" in
*:$place/bin:*) ;;
*) export PATH="\$PATH:$place/bin" ;;
esac
END

if [[ -z $profile ]]; then
    drop /etc/hpc-mp/profile /etc/hpc-mp/site.toml
    exit 0
fi
put /etc/hpc-mp/profile 644 <<<"$profile"
put /etc/hpc-mp/site.toml 644 <<END
# Written by the cluster-init of hpc-mp from hpc_mp.profile: change the cluster's settings. A job file, hpc-mp/site.toml beside it
# and ~/.config/hpc-mp/site.toml come before this one.
[environment]
profile = "$profile"
END
