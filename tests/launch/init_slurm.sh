# scontrol, sinfo and sacctmgr of a cluster with a partition of GPUs and one that is down.
case "$(basename "$0") $*" in
"scontrol ping") echo "Slurmctld(primary) at ctl is UP";;
"scontrol --version") echo "slurm 24.11.5";;
"scontrol show node"*) echo "NodeName=n1 CPUEfctv=30 CPUTot=32";;
"sinfo "*) echo "gpu*|up|2:00:00|32|500000|gpu:l40s:4|n[1-6]"; echo "cpu|down|infinite|64|500000|(null)|c[1-9]";;
"sacctmgr "*) echo "lab|lab";;
esac
