# shellcheck shell=bash
# An etcd inside the allocation, for sbatch files to source. Afterwards ETCD says where agents meet.
#
#   ETCD=etcd1:2379,etcd2:2379   an etcd that is there anyway; then this file starts none
#   ETCD_NODES=1                 how many of the job's first nodes have a member: 1 or 3
#
# One member is enough for a batch job: the batch script runs on the first node, and ends with it. Three
# are for `salloc`, whose shell runs elsewhere: then any one of them may be lost.
#
# etcd and etcdctl, 3.5.6 or newer, have to be on the PATH of the compute nodes.
#
# Nobody is asked for a password here, and squeue tells everybody the ports. Count the right to write
# into the job as the right to run code in its workers: where you don't trust everybody in the cluster's
# network, give an ETCD with TLS and users, and PET_CACERT, PET_CERT and PET_KEY, or PET_USER.

etcd_member() { # etcd_member ARGUMENT...: serve until Slurm ends this step
    local data
    data=$(mktemp --directory) # on a disk of the node; an etcd that is lost does not come back
    trap '' USR2               # that is for the agents
    trap 'kill "$!"; wait; rm -rf "$data"; exit' TERM
    etcd --data-dir "$data" --log-level warn "$@" &
    wait
}

is_used() { # is_used PORT ADDRESS...: somebody serves at one of the ports that a member at each needs
    local first=$1 address i
    shift
    for address; do
        for ((i = 0; i < 2 * $#; i++)); do
            (: <"/dev/tcp/$address/$((first + i))") 2>/dev/null && return
        done
    done
    return 1
}

free_port() { # free_port ADDRESS...: this job's first one, or the next that no other job has
    # Below those that the kernel gives to clients.
    local port=$((20000 + SLURM_JOB_ID % 1000 * 10))
    while is_used "$port" "$@"; do
        port=$((port + 10))
    done
    echo "$port"
}

start_etcd() {
    local nodes address port cluster="" i
    local -a addresses
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "${ETCD_NODES:-1}")
    for i in "${!nodes[@]}"; do
        # Where Slurm reaches the node: its name, or an address.
        addresses+=("$(scontrol show node "${nodes[i]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')")
    done
    port=$(free_port "${addresses[@]}") # nodes may be shared with other jobs
    for i in "${!nodes[@]}"; do
        address=${addresses[i]}
        ETCD+="${ETCD:+,}$address:$((port + 2 * i))"
        cluster+="${cluster:+,}m$i=http://$address:$((port + 2 * i + 1))"
    done
    export -f etcd_member
    for i in "${!nodes[@]}"; do
        address=${addresses[i]}
        # A step of its own beside the agents', which it takes nothing from (--overlap).
        srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[i]}" bash -c 'etcd_member "$@"' member \
            --name "m$i" --initial-cluster "$cluster" --initial-cluster-token "$SLURM_JOB_ID" \
            --listen-client-urls "http://0.0.0.0:$((port + 2 * i))" \
            --advertise-client-urls "http://$address:$((port + 2 * i))" \
            --listen-peer-urls "http://0.0.0.0:$((port + 2 * i + 1))" \
            --initial-advertise-peer-urls "http://$address:$((port + 2 * i + 1))" &
    done
    for ((i = 0; i < 60; i++)); do
        if etcdctl --endpoints "$ETCD" endpoint health >/dev/null 2>&1; then return; fi
        sleep 1
    done
    echo "etcd.sh: no etcd answers at $ETCD" >&2
    exit 1
}

outcome() { # outcome JOB: succeeded, failed or stopped, as etcd has it; nothing while it runs
    elastic-etcd status "$1" --etcd "$ETCD" --json |
        python -c 'import json, sys; print((json.load(sys.stdin)["outcome"] or {}).get("state", ""))'
}

if [ -z "${ETCD:-}" ]; then start_etcd; fi
export ETCD
