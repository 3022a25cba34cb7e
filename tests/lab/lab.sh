#!/usr/bin/env bash
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# A lab of real Linux hosts on one machine: each has its own systemd (pid 1), sshd, network namespace, addresses and writable
# root; all share one read-only root file system. Root only; no daemon, no image store, no virtual machine.
#
#   lab.sh check                 one line: can the lab run on this machine, and if not, why (exit status 0 or 1)
#   lab.sh up [OPTION]... HOST...    make the hosts and wait until they are ready; hosts that exist are left as they are
#          --gpus N[:MODEL]      the hosts get the fake NVML library and N GPUs (H100, H200, B200, A100, L40S, GB10)
#          --hcas N[:ib|roce]    the hosts get N HCAs below /sys/class/infiniband (roce: HCA k belongs to fabric network k)
#          --owner PID           the lab goes when this process ends, however it ends
#   lab.sh run CMD...            run CMD where the hosts' addresses are reachable, and nothing else is; a lab that CMD makes goes with it
#   lab.sh ssh HOST [CMD...]     a shell or command on a host, over the network
#   lab.sh console HOST CMD...   the same without the network: works on a host that is cut off, and leaves no trace in sshd's journal
#   lab.sh stop|kill|start|reboot HOST...     orderly power-off, power cut, power on, orderly reboot
#   lab.sh cut|heal HOST[:ethN]...            take the host's cables (or that one) out, or put them back
#   lab.sh part|join HOST HOST [ethN]         break or mend the way between two hosts only, on all networks or on one
#   lab.sh list | inventory      what there is; an Ansible inventory of it
#   lab.sh down                  remove everything of this lab and nothing else (safe at any time)
#
# Settings: LAB_NAME (letters and digits, default lab), LAB_DIR (disks and keys), LAB_NET (10.77.0, a /24), LAB_FABRIC ("10.78.0 10.79.0": further
# networks, eth1 and eth2), LAB_SEED and LAB_SEED_<host> (trees copied into each root, a host's - written _), LAB_BIND_RO ("/here:/there ..."),
# LAB_ROOT (a root made by mkroot.sh), LAB_PYTHON (python3), and those of mkroot.sh. The networks are settled by the first `up`.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SELF=$HERE/$(basename "${BASH_SOURCE[0]}")
LAB=${LAB_NAME:-lab}
RUN=/run/rankzero-lab           # what is live (gone after a reboot of the machine, as namespaces and cgroups are)
STATE=$RUN/$LAB
TAG=lab-$LAB                    # the name of this lab's cgroup; its namespaces are TAG.hub and TAG-HOST
HUB=$TAG.hub
if [[ -d /sys/fs/cgroup/unified ]]; then V2=/sys/fs/cgroup/unified; else V2=/sys/fs/cgroup; fi

die() { echo "lab: $*" >&2; exit 1; }

[[ $LAB =~ ^[a-z][a-z0-9]{0,11}$ ]] || die "LAB_NAME must be 1 to 12 small letters and digits, beginning with a letter: $LAB"
DIR=$(realpath -m "$(cat "$STATE/dir" 2>/dev/null || echo "${LAB_DIR:-/var/tmp/$TAG}")")
MARK=$DIR/.rankzero-lab         # says whose directory it is, so that nothing else is ever removed

# ---- what is there -----------------------------------------------------------------------------------------------------------------

# Start in the background what must stay when the `run` that we may be in, of whichever lab, ends: out of that lab's hub. $! is its pid.
outside() {
    local net=/proc/${LAB_RUNNER:-self}/ns/net
    [[ -e $net ]] || net=/proc/self/ns/net
    exec setsid nsenter --net="$net" -- "$@"
}
in_hub() { nsenter --net="/run/netns/$HUB" -- "$@"; }           # not "ip netns exec": that hides /sys/fs/cgroup
hosts() { local d; for d in "$DIR"/hosts/*/made; do [[ ! -e $d ]] || basename "$(dirname "$d")"; done; }
known() { [[ -e $DIR/hosts/$1/made ]] || die "no host $1 in lab $LAB"; }
networks() { cat "$STATE/networks"; }                            # lines "eth0 10.77.0"
interfaces() { networks | cut -d' ' -f1; }
prefix() { networks | awk -v i="$1" '$1 == i {print $2}'; }
addr() { echo "$(prefix "${2:-eth0}").$(cat "$DIR/hosts/$1/number")"; }
port() { echo "v${2#eth}$1"; }                                   # the hub's end of a host's cable
pids() { find "$V2/$TAG${1:+/$1}" -name cgroup.procs -exec cat {} + 2>/dev/null || true; }
is_on() { [[ -n $(pids "$1") ]]; }

init_pid() {    # host $1's pid 1, as this machine numbers it
    local p
    while read -r p; do
        if grep -qsE '^NSpid:.*[[:space:]]1$' "/proc/$p/status"; then echo "$p"; return 0; fi
    done < <(cat "$V2/$TAG/$1/payload/init.scope/cgroup.procs" 2>/dev/null)
}

console() {     # run a command inside host $1 without its network
    local n=$1 p; shift
    p=$(init_pid "$n"); [[ -n $p ]] || return 255
    nsenter -t "$p" -m -u -i -n -p -C -- env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" "$@"
}

# ---- who owns what -----------------------------------------------------------------------------------------------------------------

lock() {        # one command at a time changes the lab; the file goes with the lab, hence the second look
    mkdir -p "$RUN"
    while :; do
        exec 9> "$STATE.lock"; flock 9
        [[ $STATE.lock -ef /proc/self/fd/9 ]] && return 0        # 0 said aloud: in an EXIT trap a bare return means the status before it
    done
}
unlock() { exec 9>&-; }

claim() {       # take the directory and the names, or say who has them
    local t i=1 f
    [[ -e $STATE/dir ]] && return 0
    if [[ -e $MARK ]]; then
        [[ $(< "$MARK") == "$LAB" ]] || die "$DIR belongs to lab $(< "$MARK")"
        rm -rf "$DIR"                    # of a lab that ended with the machine
    fi
    [[ -z $(ls -A "$DIR" 2>/dev/null) ]] || die "$DIR is not empty and not a lab's"
    for t in "$V2" /sys/fs/cgroup/systemd; do [[ ! -e $t/$TAG ]] || die "a cgroup $t/$TAG is there and not this lab's"; done
    mkdir -p "$DIR" "$STATE/netns"; echo "$LAB" > "$MARK"
    { echo "eth0 ${LAB_NET:-10.77.0}"; for f in ${LAB_FABRIC:-}; do echo "eth$i $f"; i=$((i + 1)); done; } > "$STATE/networks"
    if [[ ! -d /run/netns ]]; then touch "$STATE/made-run-netns"; fi
    echo "$DIR" > "$STATE/dir"
}

netns_add() {
    [[ ! -e /run/netns/$1 ]] || die "a network namespace $1 is there and not this lab's"
    touch "$STATE/netns/$1"; ip netns add "$1"; ip -n "$1" link set lo up
}

netns_del() { if [[ -e /run/netns/$1 ]]; then ip netns del "$1"; fi; rm -f "$STATE/netns/$1"; }

watch_start() { # end the lab when process $1 does: no trap can promise that after kill -9
    local w i
    for w in "$STATE"/watch/*; do [[ ! -e $w ]] || return 0; done
    mkdir -p "$STATE/watch"
    outside "$SELF" watch-owner "$1" > /dev/null 2>&1 < /dev/null 9>&- &
    for ((i = 0; i < 500; i++)); do     # from then on it is in a session of its own and known by its command line
        [[ ! -e $STATE/watch/$! ]] || return 0
        sleep 0.02
    done
    die "the watch over process $1 did not start"
}

watch_stop() {
    local w p
    for w in "$STATE"/watch/*; do
        [[ -e $w ]] || continue
        p=$(basename "$w"); rm -f "$w"
        [[ $p != "$$" && $(tr '\0' ' ' < "/proc/$p/cmdline" 2>/dev/null) == *"$SELF watch-owner "* ]] || continue
        kill -- "-$p" 2>/dev/null || true
    done
}

# ---- networks ----------------------------------------------------------------------------------------------------------------------

hub() {         # no uplink, no forwarding: nothing can leave, and one network does not reach the other
    local i p
    [[ -e $STATE/netns/$HUB ]] || { netns_add "$HUB"; in_hub sh -c 'echo 0 > /proc/sys/net/ipv4/ip_forward'; }
    while read -r i p; do
        ip -n "$HUB" link show "br${i#eth}" > /dev/null 2>&1 && continue
        ip -n "$HUB" link add "br${i#eth}" type bridge
        # The controller is on the first network only, as it is in a data centre.
        [[ $i != eth0 ]] || ip -n "$HUB" addr add "$p.1/24" dev br0
        ip -n "$HUB" link set "br${i#eth}" up
    done < "$STATE/networks"
}

plug() {        # give host $1 its namespace and cables
    local n=$1 ns=$TAG-$1 i p
    netns_add "$ns"
    nsenter --net="/run/netns/$ns" -- sh -c 'echo 0 > /proc/sys/net/ipv4/ip_forward'
    while read -r i p; do
        ip -n "$HUB" link add "$(port "$n" "$i")" type veth peer name "$i" netns "$ns"
        ip -n "$HUB" link set "$(port "$n" "$i")" master "br${i#eth}"
        ip -n "$ns" addr add "$p.$(cat "$DIR/hosts/$n/number")/24" broadcast + dev "$i"
        ip -n "$ns" link set "$i" up
    done < "$STATE/networks"
}

cable() {       # cable in|out HOST[:ethN]: what a person pulled stays out over power cycles
    local way=$1 n=${2%%:*} i which
    known "$n"
    if [[ $2 == *:* ]]; then which=${2#*:}; [[ -n $(prefix "$which") ]] || die "no network $which in lab $LAB"; else which=$(interfaces); fi
    for i in $which; do
        if [[ $way == out ]]; then
            touch "$DIR/hosts/$n/cut.$i"; ip -n "$HUB" link set "$(port "$n" "$i")" down
        else
            rm -f "$DIR/hosts/$n/cut.$i"
            if is_on "$n"; then ip -n "$HUB" link set "$(port "$n" "$i")" up; fi
        fi
    done
}

between() {     # between part|join HOST HOST [ethN]: frames for each other go to a card that nobody has, so that it is silent as a broken way is
    local way=$1 a=$2 b=$3 i
    known "$a"; known "$b"
    for i in ${4:-$(interfaces)}; do
        [[ -n $(prefix "$i") ]] || die "no network $i in lab $LAB"
        for _ in 1 2; do
            if [[ $way == part ]]; then ip -n "$TAG-$a" neigh replace "$(addr "$b" "$i")" lladdr 02:de:ad:00:00:00 nud permanent dev "$i"
            else ip -n "$TAG-$a" neigh del "$(addr "$b" "$i")" dev "$i" 2>/dev/null || true; fi
            a=$3 b=$2
        done
        a=$2 b=$3
    done
}

# ---- one host ----------------------------------------------------------------------------------------------------------------------

nvml_library() {        # built once for a lab
    local out=$DIR/fake_nvml
    if [[ ! -e $out/libnvidia-ml.so.1 ]]; then
        mkdir -p "$out"
        # The library answers NOT_SUPPORTED for whatever the hosts' binding knows and it does not: let it see that binding.
        PYTHONPATH=$(cat "$STATE/root")/usr/lib/python3/dist-packages "${LAB_PYTHON:-python3}" "$HERE/../fake_nvml/build.py" --out "$out" > /dev/null
        [[ -e $out/libnvidia-ml.so.1 ]] || die "fake_nvml/build.py made no libnvidia-ml.so.1"
    fi
    echo "$out"
}

hardware() {    # fake_nvml and HCAs of host $1 into its disk
    local n=$1 up=$DIR/hosts/$1/up lib
    lib=$up/usr/lib/$(uname -m)-linux-gnu
    [[ -n $GPUS$HCAS ]] || return 0
    "${LAB_PYTHON:-python3}" "$HERE/hardware.py" --host "$LAB.$n" --number "$(cat "$DIR/hosts/$n/number")" --gpus "${GPUS:-0}" --hcas "${HCAS:-0}" \
        --fabric "$(networks | awk '$1 != "eth0" {printf "%s ", $2}')" --out "$up"
    [[ -n $GPUS ]] || return 0
    mkdir -p "$lib"; cp -P "$(nvml_library)"/libnvidia-ml.so* "$lib/"
}

seed() {        # copy tree $2 into the disk of host $1; not its ownership, nor the mode of its top (a mkdtemp's 0700 would shut users out of /)
    [[ -d $2 ]] || die "no such directory: $2"
    cp -a --no-preserve=ownership "$2/." "$DIR/hosts/$1/up/"; chmod 755 "$DIR/hosts/$1/up"
}

define() {      # make the disk, keys, namespace and cables of host $1, number $2
    local n=$1 h=$DIR/hosts/$1 own=LAB_SEED_${1//-/_}
    mkdir -p "$h/work" "$h/m"; mkdir -m 755 "$h/up"; echo "$2" > "$h/number"; echo "${LAB_BIND_RO:-}" > "$h/bind"
    hardware "$n"
    [[ -z ${LAB_SEED:-} ]] || seed "$n" "$LAB_SEED"
    [[ -z ${!own:-} ]] || seed "$n" "${!own}"
    mkdir -p "$h/up/etc/ssh" "$h/up/home/ansible/.ssh"; mkdir -p "$h/up/root"; install -d -m 700 "$h/up/root/.ssh"
    ssh-keygen -q -t ed25519 -N '' -C "root@$n" -f "$h/up/etc/ssh/ssh_host_ed25519_key"
    install -m 600 "$DIR/id.pub" "$h/up/root/.ssh/authorized_keys"
    install -m 600 "$DIR/id.pub" "$h/up/home/ansible/.ssh/authorized_keys"
    chown -R 1000:1000 "$h/up/home/ansible"; chmod 700 "$h/up/home/ansible/.ssh"
    echo "$n" > "$h/up/etc/hostname"
    plug "$n"
    touch "$h/made"
}

undefine() {    # what an `up` that was ended half way left of host $1
    local i
    for i in $(interfaces); do ip -n "$HUB" link del "$(port "$1" "$i")" 2>/dev/null || true; done
    if [[ -e $STATE/netns/$TAG-$1 ]]; then netns_del "$TAG-$1"; fi
    rm -rf "$DIR/hosts/$1"
}

start() {       # power on host $1 (its disk and cables exist)
    local n=$1 h=$DIR/hosts/$1 b i opt=()
    known "$n"; ! is_on "$n" || die "$n is on"
    mux_exit "$n"
    cp "$DIR/hosts.txt" "$h/up/etc/hosts"
    for b in $(< "$h/bind"); do opt+=(--bind-ro="$b"); done
    for i in $(interfaces); do [[ -e $h/cut.$i ]] || ip -n "$HUB" link set "$(port "$n" "$i")" up; done
    touch "$STATE/cgroup"
    outside unshare --mount --propagation private "$HERE/host.sh" "$n" "$(cat "$STATE/root")" "$h" "$TAG" "$(interfaces | tr '\n' ' ')" \
        "${opt[@]}" >> "$h/console.log" 2>&1 < /dev/null 9>&- &
}

ready() {       # wait until systemd on host $1 says that it is up
    local n=$1 i s
    for ((i = 0; i < 600; i++)); do
        if s=$(console "$n" systemctl is-system-running --wait 2>/dev/null) || [[ $s == degraded ]]; then
            [[ $s == running ]] || echo "lab: $n is $s: $(console "$n" systemctl --failed --plain --no-legend | cut -d' ' -f1 | tr '\n' ' ')" >&2
            return 0
        fi
        sleep 0.1
    done
    tail -n 20 "$DIR/hosts/$n/console.log" >&2; die "$n did not come up"
}

stop() {        # orderly
    local i p
    known "$1"
    for p in $(pids "$1/supervisor"); do
        [[ $(cat "/proc/$p/comm" 2>/dev/null) == systemd-nspawn ]] && kill -TERM "$p"
    done
    for ((i = 0; i < 300; i++)); do is_on "$1" || return 0; sleep 0.1; done
    echo "lab: $1 did not stop, killing it" >&2; power_cut "$1"
}

reboot() {
    local n=$1 old now i
    known "$n"; old=$(init_pid "$n"); [[ -n $old ]] || die "$n is off"
    console "$n" systemctl reboot
    for ((i = 0; i < 600; i++)); do
        now=$(init_pid "$n"); [[ -n $now && $now != "$old" ]] && break
        sleep 0.1
    done
    ready "$n"
}

kill_group() {  # kill all in a cgroup at once and wait for it: killing nspawn alone leaves the host running
    local i
    [[ -e $V2/$TAG${1:+/$1}/cgroup.kill ]] || return 0
    echo 1 > "$V2/$TAG${1:+/$1}/cgroup.kill"
    for ((i = 0; i < 200; i++)); do [[ -n $(pids "${1:-}") ]] || return 0; sleep 0.05; done
    die "processes left: $(pids "${1:-}")"
}

power_cut() {   # as if the power failed: the cables go dead first, so that not even a FIN leaves the host
    local i
    known "$1"
    for i in $(interfaces); do ip -n "$HUB" link set "$(port "$1" "$i")" down; done
    kill_group "$1"
}

# ---- the lab -----------------------------------------------------------------------------------------------------------------------

names() {       # everyone knows everyone, the controller included
    local n i p
    { echo "127.0.0.1 localhost"; echo "::1 localhost"
      for n in $(hosts); do
          while read -r i p; do if [[ $i == eth0 ]]; then echo "$p.$(cat "$DIR/hosts/$n/number") $n"; else echo "$p.$(cat "$DIR/hosts/$n/number") $n-$i"; fi; done < "$STATE/networks"
      done
    } > "$DIR/hosts.txt"
    { echo "Host *"; echo " User root"; echo " IdentityFile $DIR/id"; echo " IdentitiesOnly yes"; echo " LogLevel ERROR"
      echo " UserKnownHostsFile $DIR/known_hosts"; echo " StrictHostKeyChecking yes"; echo " ConnectTimeout 5"
      echo " ServerAliveInterval 5"; echo " ServerAliveCountMax 3"
      for n in $(hosts); do echo "Host $n"; echo " HostName $(addr "$n")"; echo " HostKeyAlias $n"; done
    } > "$DIR/ssh_config"
    for n in $(hosts); do echo "$n $(cut -d' ' -f1,2 "$DIR/hosts/$n/up/etc/ssh/ssh_host_ed25519_key.pub")"; done > "$DIR/known_hosts"
    { echo "[all]"; for n in $(hosts); do echo "$n ansible_host=$(addr "$n")"; done
      echo "[all:vars]"; echo "ansible_user=root"; echo "ansible_python_interpreter=/usr/bin/python3"; echo "ansible_pipelining=true"
      # Sockets named by address, in a folder of the lab's own: a connection that outlived its host can be found and ended.
      echo "ansible_control_path_dir=$DIR/cp"; echo "ansible_control_path=%(directory)s/%%h-%%p-%%r"
      echo "ansible_ssh_executable=$DIR/ssh"; echo "ansible_ssh_common_args=-F $DIR/ssh_config -o HostKeyAlias={{ inventory_hostname }}"
    } > "$DIR/inventory.ini"
    printf '#!/bin/sh\nexec nsenter --net=/run/netns/%s -- ssh "$@"\n' "$HUB" > "$DIR/ssh"; chmod +x "$DIR/ssh"
    for n in $(hosts); do if is_on "$n"; then console "$n" tee /etc/hosts < "$DIR/hosts.txt" > /dev/null; fi; done
}

mux_exit() {    # a multiplexed connection left from before hangs whoever next uses it: end those to host $1, or all
    local c
    for c in "$DIR/cp/${1:+$(addr "$1")-}"*; do
        [[ ! -S $c ]] || timeout 2 ssh -F none -O exit -o ControlPath="$c" x 2>/dev/null || true
    done
}

up() {
    local n new=() num=11 owner=''
    GPUS='' HCAS=''
    while [[ ${1:-} == --* ]]; do
        [[ -n ${2:-} ]] || die "$1 needs a value"
        case $1 in --gpus) GPUS=$2 ;; --hcas) HCAS=$2 ;; --owner) owner=$2 ;; *) die "unknown option $1" ;; esac
        shift 2
    done
    (($#)) || die "up: name the hosts"
    for n in "$@"; do [[ $n =~ ^[a-z][a-z0-9-]{0,11}$ ]] || die "not a host name of 1 to 12 small letters, digits and '-': $n"; done
    [[ -e $STATE/root ]] || ROOT=${LAB_ROOT:-$("$HERE/mkroot.sh")}
    lock; claim
    [[ -e $STATE/root ]] || echo "$ROOT" > "$STATE/root"
    if [[ -n $owner ]]; then watch_start "$owner"; fi
    hub
    [[ -e $DIR/id ]] || ssh-keygen -q -t ed25519 -N '' -C "$TAG" -f "$DIR/id"
    for n in "$@"; do
        [[ ! -e $DIR/hosts/$n/made ]] || continue
        undefine "$n"
        while grep -qsx "$num" "$DIR"/hosts/*/number; do num=$((num + 1)); done
        define "$n" "$num"; new+=("$n")
    done
    names
    for n in "${new[@]}"; do start "$n"; done
    unlock
    for n in "$@"; do if is_on "$n" || [[ " ${new[*]} " == *" $n "* ]]; then ready "$n"; fi; done
}

sweep() {       # what a command of `run` left behind in the hub, such as a server that it started
    local i signal=TERM all
    [[ -e /run/netns/$HUB ]] || return 0
    for ((i = 0; i < 60; i++)); do
        mapfile -t all < <(ip netns pids "$HUB")
        ((${#all[@]})) || return 0
        ((i < 40)) || signal=KILL
        kill -s $signal "${all[@]}" 2>/dev/null || true
        sleep 0.05
    done
}

down() {
    local n t i
    lock
    if [[ ! -e $STATE/dir ]]; then
        if [[ -e $MARK && $(< "$MARK") == "$LAB" ]]; then rm -rf "$DIR"; fi        # its live part ended with the machine
        rm -rf "$STATE"; rm -f "$STATE.lock"; rmdir "$RUN" 2>/dev/null || true
        return 0
    fi
    watch_stop; mux_exit
    if [[ -e $STATE/cgroup ]]; then
        kill_group
        for t in "$V2" /sys/fs/cgroup/systemd; do
            for ((i = 0; i < 50; i++)); do
                [[ -d $t/$TAG ]] || break
                find "$t/$TAG" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
            done
        done
    fi
    for n in "$STATE"/netns/*; do
        n=$(basename "$n")
        [[ $n != "$HUB" ]] || continue
        netns_del "$n"
    done
    for n in "$DIR"/hosts/*; do rm -rf "/run/systemd/nspawn/propagate/$TAG-$(basename "$n")" "/run/systemd/nspawn/unix-export/$TAG-$(basename "$n")"; done
    rmdir /run/systemd/nspawn/propagate /run/systemd/nspawn/unix-export /run/systemd/nspawn 2>/dev/null || true      # nspawn makes them anew
    if [[ -e $MARK ]]; then rm -rf "$DIR"; fi
    if [[ /proc/self/ns/net -ef /run/netns/$HUB ]]; then       # we live in the hub: `run` removes it at its end
        for i in $(interfaces); do ip -n "$HUB" link del "br${i#eth}" 2>/dev/null || true; done
        mkdir -p "$DIR"; echo "$LAB" > "$MARK"; touch "$STATE/emptied"; rm -f "$STATE/cgroup" "$STATE/root"
        return 0
    fi
    sweep; netns_del "$HUB"
    # iproute2 made this mount for us; with other namespaces in it, it is busy and stays.
    if [[ -e $STATE/made-run-netns && -z $(ls -A /run/netns) ]] && umount /run/netns 2>/dev/null; then rmdir /run/netns || true; fi
    rm -rf "$STATE"; rm -f "$STATE.lock"; rmdir "$RUN" 2>/dev/null || true
}

run() {         # the child must not outlive us, must not read /dev/null, and must see a Ctrl-C although the shell starts it in the background
    local rc=0 child mine=''
    lock; claim
    if [[ ! -e $STATE/netns/$HUB ]]; then mine=yes; watch_start $$; hub; trap down EXIT; fi
    unlock
    nsenter --net="/run/netns/$HUB" -- setpriv --pdeathsig TERM -- env --default-signal=INT,QUIT LAB_RUNNER="${LAB_RUNNER:-$$}" "$@" <&0 &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' TERM HUP
    if [[ -t 0 ]]; then trap : INT; else trap 'kill -INT "$child" 2>/dev/null' INT; fi      # a terminal tells the child itself
    wait "$child" || rc=$?
    while kill -0 "$child" 2>/dev/null; do rc=0; wait "$child" || rc=$?; done               # a signal cut the first wait short
    if [[ -z $mine && -e $STATE/emptied && -z $(hosts) && -z $(ip netns pids "$HUB") ]]; then down; fi
    exit "$rc"
}

overlay_works() {
    unshare --mount --propagation private bash -e /dev/fd/3 3<<'INSIDE'
        d=$(mktemp -d); trap 'umount -R "$d"; rmdir "$d"' EXIT
        mount -t tmpfs t "$d"; mkdir "$d/l" "$d/u" "$d/w" "$d/m"; mount -t overlay o -o "lowerdir=$d/l,upperdir=$d/u,workdir=$d/w" "$d/m"
INSIDE
}

check() {
    local no='' t missing=()
    for t in mmdebstrap systemd-nspawn ip ssh ssh-keygen; do command -v $t > /dev/null || missing+=("$t"); done
    if ((EUID != 0)); then no="needs root"
    elif ((${#missing[@]})) && { [[ ${LAB_APT:-yes} == no ]] || ! command -v apt-get > /dev/null; }; then no="no ${missing[*]}, and no apt-get to install them"
    elif ! unshare --mount --net --propagation private true 2>/dev/null; then no="new mount and network namespaces are not allowed"
    elif ! overlay_works 2>/dev/null; then no="overlay mounts are not allowed"
    elif [[ ! -e $V2/cgroup.procs ]]; then no="no cgroup2 at $V2"
    elif ! mkdir "$V2/$TAG-check$$" 2>/dev/null; then no="$V2 is not writable"
    elif [[ ! -e $V2/$TAG-check$$/cgroup.kill ]]; then no="the kernel has no cgroup.kill (5.14 and later have)"; fi
    rmdir "$V2/$TAG-check$$" 2>/dev/null || true
    [[ -z $no ]] || { echo "the lab cannot run here: $no"; return 1; }
    echo "the lab can run here${missing:+ (apt-get will install what ${missing[*]} come in)}"
}

cmd=${1:-help}; shift || true
case $cmd in check | help | -h | --help) ;; *)
    ((EUID == 0)) || die "needs root"
    case $cmd in up | run | down | watch-owner) ;; *) [[ -e $STATE/dir ]] || die "lab $LAB is not up" ;; esac
esac
case $cmd in
check) check ;;
up) up "$@" ;;
run) (($#)) || die "run: name a command"; run "$@" ;;
ssh) exec nsenter --net="/run/netns/$HUB" -- ssh -F "$DIR/ssh_config" "$@" ;;
console) known "$1"; [[ -n $(init_pid "$1") ]] || die "$1 is off"; console "$@" ;;
start) lock; for n in "$@"; do start "$n"; done; unlock; for n in "$@"; do ready "$n"; done ;;
stop) for n in "$@"; do stop "$n"; done ;;
kill) for n in "$@"; do power_cut "$n"; done ;;
reboot) for n in "$@"; do reboot "$n"; done ;;
cut) for n in "$@"; do cable out "$n"; done ;;
heal) for n in "$@"; do cable in "$n"; done ;;
part | join) (($# >= 2)) || die "$cmd: name two hosts"; between "$cmd" "$@" ;;
list) for n in $(hosts); do c=$(pids "$n" | wc -l); echo "$n $(addr "$n") $( ((c > 0)) && echo on || echo off) procs=$c"; done ;;
inventory) cat "$DIR/inventory.ini" ;;
down) down ;;
watch-owner) touch "$STATE/watch/$$"; tail --pid="$1" -s 0.2 -f /dev/null; rm -f "$STATE/watch/$$"; down ;;
*) sed -n '/^# A lab/,/^set /{/^#/p}' "$SELF" | cut -c3- ;;
esac
