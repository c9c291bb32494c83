# The second half of RUN/program.sh, which every rank of a program in a container runs there; the image need not have more than a
# POSIX shell. In front of it the supervisor writes, for each attempt, what this rank must know:
#
#   hpc_mp_token, hpc_mp_attempt                the attempt, and the token by which its ranks know each other
#   hpc_mp_failures                             where a rank writes why it could not start, but for its number
#   hpc_mp_ours                                 names of variables that are between the launcher and the ranks
#   hpc_mp_directory, hpc_mp_name, …_json       program.directory and program.command[0], as they are and as JSON has them
#   hpc_mp_tell, hpc_mp_place, hpc_mp_become    functions: export what is the same for all ranks; export what is this rank's own
#                                               ($1: host and local number) and set hpc_mp_rank and hpc_mp_name; become the program
#
# shellcheck disable=SC2154 # all of these

if [ "${HPC_MP_TOKEN-}" != "$hpc_mp_token" ]; then
    echo "hpc-mp: attempt ${HPC_MP_TOKEN-} is no longer the run's current one; it ends" >&2
    exit 1
fi
# shellcheck disable=SC2086 # names, each a word
unset $hpc_mp_ours

# Why this rank cannot become the program, for people and, with what JSON needs escaped, for the verdict.
refuse() {
    echo "hpc-mp: $1" >&2
    # The time is rounded up: a record that is older than the announcement of its rank counts as an earlier start's.
    record=$(printf '%s-rank-%05d.json' "$hpc_mp_failures" "$hpc_mp_rank")
    printf '{"rank": %s, "node": "%s", "kind": "user", "message": "%s: %s", "time": %s, "attempt": %s}\n' \
        "$hpc_mp_rank" "$SLURMD_NODENAME" "$SLURMD_NODENAME" "$2" "$(($(date +%s || echo 0) + 1))" "$hpc_mp_attempt" >"$record.part"
    mv -f "$record.part" "$record"
    exit 2
}
missing() { # KEY VALUE VALUE_AS_JSON WHY REMEDY
    refuse "$1 = '$2': $4. To mend it: $5" "$1 = '$3': $4. To mend it: $5"
}

if ! hpc_mp_place "${SLURMD_NODENAME-} ${SLURM_LOCALID-}"; then
    echo "hpc-mp: host ${SLURMD_NODENAME-}, local rank ${SLURM_LOCALID-}: is not the place of a rank" >&2
    exit 2
fi
# A line is to be in the log once it is printed, also in the moment before a crash; a crash of native code is to leave its stack.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}" PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER-1}"
hpc_mp_tell
cd -- "$hpc_mp_directory" ||
    missing program.directory "$hpc_mp_directory" "$hpc_mp_directory_json" "cannot be entered in the container" \
        "set it to a directory of the image or of slurm.container_mounts"
command -v "$hpc_mp_name" >/dev/null ||
    missing "program.command[0]" "$hpc_mp_name" "$hpc_mp_name_json" "does not exist in the container, or is not executable" \
        "name a program of the image, or mount it with slurm.container_mounts"
hpc_mp_become
