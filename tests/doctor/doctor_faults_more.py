"""The other half of what can be wrong with a node: memory, processors, disks, processes, the kernel."""

from __future__ import annotations

from pathlib import Path

from case import Case
from doctor_faults import CPU, FAULTS, IB, RAID, STAT, SYS, logged, process, up
from machines.tree import HANGS

MEM = "/proc/meminfo"

MORE: tuple[Case, ...] = (
    Case("memory-size", "ndv5", {MEM: ("1961032704 kB", "1400000000 kB")}, "error",
         "1.3 TiB; a Standard_ND96isr_H100_v5 has 1.83 TiB", also=("memory-free",)),
    Case("memory-nodes", "ndv5", {"/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  400000000 kB"}, "warning",
          "memory node 1: 381 GiB; the largest has 935 GiB"),
    Case("memory-free", "ndv5", {MEM: ("MemAvailable:   18", "MemAvailable:   ")}, "warning", "can be had"),
    Case("memory-swap", "ndv5",
          {MEM: "MemTotal: 1961032704 kB\nMemAvailable: 1800000000 kB\nSwapTotal: 33554432 kB\nSwapFree: 3000000 kB"},
          "warning", "29.1 GiB of 32 GiB are used"),
    Case("memory-hugepages", "ndv5", {MEM: ("HugePages_Total:       0\nHugePages_Free:        0", "HugePages_Total: 200000\n"
          "HugePages_Free: 200000")}, "warning", "200000 are set aside, 200000 of them unused (391 GiB)"),
    Case("memory-reclaim", "ndv5", {f"{SYS}/vm/zone_reclaim_mode": "1"}, "warning", "vm.zone_reclaim_mode = 1"),
    Case("memory-overcommit", "ndv5", {f"{SYS}/vm/overcommit_memory": "2"}, "warning", "vm.overcommit_memory = 2"),
    Case("memory-maps", "ndv5", {f"{SYS}/vm/max_map_count": "4096"}, "warning", "vm.max_map_count = 4096"),
    Case("numa-balancing", "ndv5", {f"{SYS}/kernel/numa_balancing": "1"}, "warning", "kernel.numa_balancing = 1, 2 memory nodes"),
    Case("shm-size", "ndv5", {f"{STAT} /dev/shm": "4096 16384 16384 100 90\n"}, "error", "/dev/shm: 64 MiB"),
    Case("shm-size", "ndv5", {f"{STAT} /dev/shm": "4096 131072 131072 100 90\n"}, "warning", "/dev/shm: 512 MiB"),
    Case("shm-size", "ndv5", {f"{STAT} /dev/shm": "4096 115000000 900000 100 90\n"}, "warning", "435 GiB of 439 GiB are used"),
    Case("shm-leftovers", "ndv5", {f"{STAT} /dev/shm": "4096 115000000 60000000 100 90\n", "/dev/shm/nccl-{aB1,cD2,eF3}": "x"},
         "warning", "3 files as NCCL, torch and MPI make them, 210 GiB in all: nccl-aB1, nccl-cD2, nccl-eF3"),
    Case("cpu-count", "ndv5", {f"{CPU}/online": "0-47", f"{CPU}/offline": "48-95"}, "warning",
         "48 processors are switched off, 48 are on", also=("cgroup-cpus",)),
    Case("cpu-count", "ndv5", {f"{CPU}/online": "0-89"}, "error", "90 processors in 2 sockets", also=("cgroup-cpus",)),
    Case("cpu-count", "ndv5", {"/sys/devices/system/node/node1": None}, "error", "1 memory nodes", also=("nic-numa",)),
    Case("cpu-governor", "ethernet", {f"{CPU}/cpu{{0..63}}/cpufreq/scaling_governor": "powersave"}, "warning",
          "powersave on 64 of 64"),
    Case("cpu-frequency", "ethernet", {f"{CPU}/cpu{{0..31}}/cpufreq/scaling_max_freq": "1200000"}, "warning",
          "32 processors are held to 1.2 of 3.9 GHz"),
    Case("clocksource", "ethernet", {"/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, "warning",
          "hpet; there"),
    Case("cpu-load", "ndv5", {"/proc/loadavg": "900.00 850.00 800.00 3/2000 1"}, "warning", "800 over 15 minutes, 96 processors"),
    Case("mount-hung", "ndv5", {f"{STAT} /amlfs": HANGS}, "unknown",
          "/amlfs: lustre from 10.0.8.1@tcp:/lustrefs: no answer within "),
    Case("mount-hung", "ndv5", {f"{STAT} /shared": 1}, "unknown", "/shared: nfs4"),
    Case("mount-missing", "ndv5", {"/proc/mounts": ("10.0.0.4:/shared /shared nfs4 rw,relatime,vers=4.2,hard,proto=tcp 0 0\n",
          "")},
          "error", "/shared: /etc/fstab has it (nfs4), it is not mounted"),
    Case("mount-readonly", "ndv5", {"/proc/mounts": ("/ ext4 rw,relatime", "/ ext4 ro,relatime")}, "error", "/: mounted ro"),
    *(Case("mount-readonly", "ndv5", {"/proc/mounts": ("/ ext4 rw,relatime", f"/ ext4 rw,relatime,discard,{word}")}, "error",
            f"/: mounted rw,relatime,discard,{word}") for word in ("emergency_ro", "shutdown")),
    Case("disk-space", "ndv5", {f"{STAT} /mnt/nvme": "4096 1700000000 1000000 340000000 339900000\n"}, "warning",
          "/mnt/nvme: 100% of"),
    Case("disk-space", "ndv5", {f"{STAT} /": "4096 127000000 1000 32000000 31000000\n"}, "error", "4.1 MB are left"),
    Case("disk-inodes", "ndv5", {f"{STAT} /": "4096 127000000 90000000 32000000 1000\n"}, "warning",
          "/: 100% of 32000000 inodes"),
    Case("nvme-state", "ndv5", {"/sys/class/nvme/nvme3/state": "dead"}, "error", "nvme3: Microsoft NVMe Direct Disk: dead"),
    Case("nvme-count", "ndv5", {"/sys/class/nvme/nvme3": None}, "warning",
          "7 disks of its own; a Standard_ND96isr_H100_v5 has 8"),
    Case("disk-raid", "ndv5", {"/proc/mdstat": "md0 : active raid1 nvme1n1[1]\n      7000 blocks super 1.2 [2/1] [_U]"}, "error",
          "md0: 1 of 2 disks"),
    *(Case("disk-raid", "ndv5",
          {"/proc/mdstat": f"{RAID}\nmd4 : {text}\nmd7 : active linear sda1[1] sdb1[0]\n      9 blocks\n"}, "error",
            f"md4: {says}") for text, says in (
        ("inactive raid1 sda3[0](F) sdb3[1](S)\n      4883648 blocks [2/2] [UU]", "2 of 2 disks; it is inactive"),
        ("inactive sdb1[1] sdc1[2]\n      4883648 blocks super 1.2", "2 of 2 disks; it is inactive"),
        ("inactive nvme1n1[1](S) nvme0n1[0](S)\n      7932 blocks super external:imsm", "0 of 0 disks; it is inactive"),
        ("active raid0 sdb1[1](F) sda1[0]\n      4883648 blocks 64k chunks", "1 of 2 disks"))),
    Case("process-stuck", "ndv5", process(66, "python3", "D", 900, 20001), "warning",
          "1 processes wait in the kernel and do not come on: python3 (66) in rpc_wait_bit_killable"),
    Case("process-zombies", "ndv5", {name: text for pid in range(100, 130) for name, text in
          process(pid, "python3", "Z", 900, 0).items()}, "warning", "30 dead processes that nobody waits for: python3 (100)"),
    Case("process-leftovers", "ndv5", process(77, "python3", "S", 1, 20001, int((up("ndv5") - 20_160) * 100)), "warning",
          "1 processes of users whose parent has gone: python3 (77) of user 20001, 5 h 36 min old"),
    Case("kernel-hardware", "ndv5", logged("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: bea0000000000108"), "error",
          "1 lines in the last day"),
    Case("kernel-hardware", "ndv5", logged("EDAC MC0: 1 UE memory read error on CPU_SrcID#0"), "error", "17 min ago: EDAC MC0"),
    Case("kernel-lockup", "ndv5", logged("INFO: task python3:4711 blocked for more than 120 seconds."), "warning",
          "blocked for more"),
    Case("kernel-lockup", "ndv5", logged("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:12]"), "warning",
          "soft lockup"),
    Case("kernel-lockup", "ndv5", logged("nfs: server 10.0.0.4 not responding, still trying"), "warning",
          "10.0.0.4 not responding"),
    Case("kernel-disk", "ndv5", logged("nvme nvme0: I/O 12 QID 3 timeout, aborting"), "error", "timeout, aborting"),
    Case("kernel-disk", "ndv5", logged("EXT4-fs error (device sda1): ext4_find_entry"), "error", "EXT4-fs error"),
    Case("kernel-oom", "ndv5", logged("Out of memory: Killed process 4711 (python3) total-vm:1kB"), "warning",
          "Killed process 4711"),
    Case("kernel-network", "ndv5", logged("neighbour: arp_cache: neighbor table overflow!".replace("neighbor t", "neighbour t")),
         "error", "table overflow"),
    Case("kernel-network", "ndv5", logged("mlx5_core 0101:00:00.0: device's health compromised - reached miss count"), "error",
          "health compromised"),
    Case("kernel-taint", "ndv5", {f"{SYS}/kernel/tainted": "12305"}, "warning", "= 12305: a machine check (M) since boot"),
    Case("kernel-taint", "ndv5", {f"{SYS}/kernel/tainted": "12449"}, "warning",
          "= 12449: a bad page of memory (B), an oops (D) since boot"),
    Case("kernel-somaxconn", "ndv5", {f"{SYS}/net/core/somaxconn": "128"}, "warning", "net.core.somaxconn = 128; 4096 serve"),
    Case("kernel-backlog", "ndv5", {f"{SYS}/net/ipv4/tcp_max_syn_backlog": "512"}, "warning", "tcp_max_syn_backlog = 512"),
    Case("kernel-neighbours", "ndv5", {f"{SYS}/net/ipv4/neigh/default/gc_thresh3": "1024"}, "warning", "gc_thresh3 = 1024"),
    Case("kernel-files", "ndv5", {f"{SYS}/fs/file-max": "200000", f"{SYS}/fs/file-nr": "5120\t0\t200000"}, "warning",
          "fs.file-max = 200000"),
    Case("kernel-pids", "ndv5", {f"{SYS}/kernel/pid_max": "32768"}, "warning", "kernel.pid_max = 32768"),
    Case("kernel-threads", "ndv5", {f"{SYS}/kernel/threads-max": "30000"}, "warning", "kernel.threads-max = 30000"),
    Case("port-range", "ndv5", {f"{SYS}/net/ipv4/ip_local_port_range": "50000\t60999"}, "warning", "11000 ports for outgoing"),
    Case("port-range", "ndv5", {f"{SYS}/net/ipv4/ip_local_port_range": "1024\t65535"}, "warning", "takes in 20000 of the ports"),
    Case("tcp-buffers", "ethernet", {f"{SYS}/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
          "/etc/slurm/slurm.conf": "ClusterName=x"},
          "warning", "may grow to 6 MiB; the fastest interface has 25 Gb/s"),
    Case("tcp-memory", "ndv5", {f"{SYS}/net/ipv4/tcp_mem": "10000\t20000\t30000"}, "warning", "may hold 78.1 MiB"),
    Case("connection-tracking", "ethernet", {f"{SYS}/net/netfilter/nf_conntrack_count": "1040000"}, "error",
          "1040000 of 1048576"),
)
KERNEL_LINES = [tuple(map(str.strip, row.split("|", 2)))
                for row in Path(__file__).with_name("kernel_lines.txt").read_text(encoding="utf-8").splitlines() if row[0] != "#"]
BENIGN = [line for _, severity, line in KERNEL_LINES if severity == "ok"]
ALL: tuple[Case, ...] = FAULTS + MORE + tuple(
    Case(code, "ndv5", logged(line), severity, line[:20]) for code, severity, line in KERNEL_LINES if severity != "ok")
ROCE = {f"{IB}/mlx5_ib{{0..7}}/ports/1/link_layer": "Ethernet", f"{IB}/mlx5_ib{{0..7}}/ports/1/gid_attrs/types/1": "RoCE v2",
        f"{IB}/mlx5_ib{{0..7}}/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:000{1..8}"}
