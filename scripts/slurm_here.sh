#!/usr/bin/env bash
# Runs a SLURM cluster of one node on this machine, as root and without systemd, for the tests marked slurm:
#   scripts/slurm_here.sh start    installs Debian's slurm-wlm and munge if they are missing, and starts their daemons
#   scripts/slurm_here.sh stop     stops these daemons
set -euo pipefail

STATE=${SLURM_HERE:-/var/tmp/slurm_here}
export SLURM_CONF=/etc/slurm/slurm.conf

running() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

install_packages() {
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

write_conf() {
    # Without cgroups and accounting, which need systemd. SLURM kills a job KillWait seconds after asking it to end.
    mkdir -p /etc/slurm "$STATE/ctld" "$STATE/slurmd"
    cat >"$SLURM_CONF" <<CONF
ClusterName=here
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobRequeue=1
KillWait=10
MinJobAge=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/slurmd
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
SlurmctldTimeout=300
SlurmdTimeout=300
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
CONF
}

start() {
    install_packages
    write_conf
    mkdir -p /run/munge
    chown munge: /run/munge
    if ! munge -n >/dev/null 2>&1; then
        runuser -u munge -- /usr/sbin/munged
    fi
    running "$STATE/slurmctld.pid" || slurmctld
    running "$STATE/slurmd.pid" || slurmd
    for _ in $(seq 60); do
        if sinfo --noheader --format %T 2>/dev/null | grep -qE '^(idle|mixed|allocated)'; then
            sinfo
            return
        fi
        sleep 1
    done
    echo "error: SLURM did not start within a minute; see $STATE/*.log" >&2
    exit 1
}

stop() {
    for daemon in slurmctld slurmd; do
        if running "$STATE/$daemon.pid"; then kill "$(cat "$STATE/$daemon.pid")"; fi
    done
    if running /run/munge/munged.pid; then kill "$(cat /run/munge/munged.pid)"; fi
}

case "${1:-}" in
start) start ;;
stop) stop ;;
*)
    echo "usage: scripts/slurm_here.sh start|stop" >&2
    exit 2
    ;;
esac
