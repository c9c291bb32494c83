#!/bin/sh
# HealthCheckProgram: the doctor, which calls healthagent's program in its turn; on nodes without the doctor, that one alone.
doctor=/usr/local/libexec/hpc-mp/hpc-mp-health
[ -x "$doctor" ] && exec "$doctor"
[ -x "@HEALTHAGENT@" ] && exec "@HEALTHAGENT@"
exit 0
