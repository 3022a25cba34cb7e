#!/usr/bin/env bash
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# One host of the lab, from power on to power off: an overlay root in a mount namespace of its own, a cgroup of its own, and
# systemd-nspawn in the network namespace made for it. Called by lab.sh, in setsid and a new mount namespace.
set -u
name=$1 root=$2 dir=$3 tag=$4 interfaces=$5; shift 5        # the rest: further nspawn options
cd /
# A cgroup per host: without it all hosts would land in one /payload cgroup.
for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
    [[ -w $tree/cgroup.procs ]] || continue
    mkdir -p "$tree/$tag/$name"; echo $$ > "$tree/$tag/$name/cgroup.procs"
done
mount -t overlay "$name" -o "lowerdir=$root,upperdir=$dir/up,workdir=$dir/work" "$dir/m" || exit 1
# The linker finds a library in its default folders also without its cache; those who look with `ldconfig -p` do not.
compgen -G "$dir/up/usr/lib/*/libnvidia-ml.so*" > /dev/null && ldconfig -r "$dir/m"
# No lock files below /run/systemd/nspawn; a pure cgroup2 tree inside also on a hybrid machine; only net.* of /proc/sys is writable.
export SYSTEMD_NSPAWN_LOCK=0 SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_API_VFS_WRITABLE=network
while :; do
    systemd-nspawn --quiet --boot --directory="$dir/m" --machine="$tag-$name" --hostname="$name" \
        --network-namespace-path="/run/netns/$tag-$name" --register=no --keep-unit --console=pipe --kill-signal=SIGRTMIN+3 \
        --link-journal=no --resolv-conf=off --timezone=off --capability=CAP_NET_ADMIN,CAP_IPC_LOCK "$@" < /dev/null
    rc=$?
    echo "[host.sh] nspawn of $name ended with $rc"
    ((rc == 133)) || break              # 133 is a reboot inside: someone has to start it again
done
# A host that is off must not answer: without this its namespace still would.
for i in $interfaces; do ip -n "$tag.hub" link set "v${i#eth}$name" down; done
exit "$rc"
