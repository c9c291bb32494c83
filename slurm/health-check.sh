#!/bin/sh
# HealthCheckProgram of Slurm, written by hpc-mp doctor install. The node's own Python runs it: 3.10 or newer.
for python in /usr/bin/python3.1[0-9] /usr/local/bin/python3.1[0-9]; do
    [ -x "$python" ] && exec "$python" -IS {archive}{options} "$@"
done
echo "hpc-mp-health: no Python 3.10 or newer in /usr/bin: this node is not looked at" >&2
{otherwise}
