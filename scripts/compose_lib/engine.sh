# A docker that answers, and its compose: installed (on Debian, as root) and started where missing.

export COMPOSE_PROJECT_NAME=elastic-etcd-test
compose=docker-compose
daemon=

answers() { docker info >/dev/null 2>&1; }

install() { # what this machine has already costs nothing
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        give_up "missing, and no root on Debian to install: $*"
    fi
    say "installing $*"
    apt-get update -qq || give_up "apt-get update failed"
    policy=/usr/sbin/policy-rc.d
    if [ -e "$policy" ]; then policy=; else printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; fi
    status=0
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 || status=$?
    [ -z "$policy" ] || rm "$policy" # nothing is started as a service
    [ $status = 0 ] || give_up "apt-get could not install $*"
}

start_engine() {
    if ! answers; then
        command -v dockerd >/dev/null || install docker.io iptables tini
        [ "$(id -u)" = 0 ] || give_up "docker does not answer, and only root may start it"
        say "starting dockerd"
        rules=$(iptables-save)
        forwarding=$(cat /proc/sys/net/ipv4/ip_forward)
        setsid dockerd >build/dockerd.log 2>&1 &
        daemon=$!
        until answers; do
            kill -0 "$daemon" 2>/dev/null || { daemon=; tail build/dockerd.log >&2; give_up "dockerd ended"; }
            [ $(($(date +%s) - began)) -lt 300 ] ||
                give_up "dockerd does not answer; see build/dockerd.log"
            sleep 0.2
        done
    fi
    if docker compose version >/dev/null 2>&1; then
        compose="docker compose"
    else
        command -v docker-compose >/dev/null || install docker-compose
    fi
    $compose version | head -n 1 >&2
}

stop_engine() {
    [ -n "$daemon" ] || return 0
    kill "$daemon"
    wait "$daemon" # it stops its containers first
    # It leaves its bridge and its rules.
    ip link delete docker0 2>/dev/null
    printf '*nat\nCOMMIT\n*filter\n:FORWARD ACCEPT\nCOMMIT\n%s\n' "$rules" | iptables-restore
    echo "$forwarding" >/proc/sys/net/ipv4/ip_forward
    say "dockerd is stopped"
}
