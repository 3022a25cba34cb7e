#!/usr/bin/env bash
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Build, or reuse, the root file system that all lab hosts share read-only; print its path as the last line. Needs root, Debian's package
# archive and a package index for Python (hosts have no network, so everything they need is in here).
#
# Settings: LAB_CACHE (/var/tmp/rankzero-lab-cache), LAB_SUITE (the running Debian's, else bookworm), LAB_EXTRA_PKGS ("python3-apt,..."),
# LAB_PYNVML (the requirement for nvidia-ml-py), LAB_APT=no (never install anything on this machine).
set -euo pipefail
CACHE=${LAB_CACHE:-/var/tmp/rankzero-lab-cache}
PYNVML=${LAB_PYNVML:-nvidia-ml-py==13.615.71}
running() { ( . /etc/os-release 2>/dev/null; [[ ${ID:-} != debian ]] || echo "${VERSION_CODENAME:-}" ); }
SUITE=${LAB_SUITE:-$(running)}; SUITE=${SUITE:-bookworm}
PKGS=systemd,systemd-sysv,dbus,openssh-server,sudo,python3,iproute2,iputils-ping,procps,ca-certificates${LAB_EXTRA_PKGS:+,$LAB_EXTRA_PKGS}

need=()
command -v mmdebstrap     > /dev/null || need+=(mmdebstrap)
command -v systemd-nspawn > /dev/null || need+=(systemd-container)
command -v ip             > /dev/null || need+=(iproute2)
command -v ssh-keygen     > /dev/null || need+=(openssh-client)
[[ -n $(running) || -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || need+=(debian-archive-keyring)
if ((${#need[@]})); then
    [[ ${LAB_APT:-yes} != no ]] || { echo "mkroot: install ${need[*]} first (LAB_APT=no forbids me to)" >&2; exit 1; }
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends "${need[@]}"; } >&2
fi

key=$( { echo "$SUITE $PKGS $PYNVML"; cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-16)
dir=$CACHE/$key
mkdir -p "$CACHE"
exec 9> "$CACHE/.lock"; flock 9
if [[ ! -e $dir/ok ]]; then
    for old in "$CACHE"/*/; do          # builds that were ended half way, and roots that nobody used for two weeks
        [[ -d $old ]] || continue
        [[ -e $old/ok && -z $(find "$old/ok" -mtime +14) ]] || grep -qsF "$old" /run/rankzero-lab/*/root || rm -rf "$old"
    done
    rm -rf "$dir"; mkdir -p "$dir/build" "$dir/wheel"
    "${LAB_PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$dir/wheel" "$PYNVML" >&2 ||
        { echo "mkroot: cannot get $PYNVML (a Python with pip? set LAB_PYTHON)" >&2; exit 1; }
    # Build in a tmpfs: dpkg's fsyncs cost more than the unpacking does. The mount lives in a private mount namespace, so nothing can leak.
    unshare --mount --propagation private bash -euo pipefail /dev/fd/3 "$dir" "$SUITE" "$PKGS" "${LAB_PYTHON:-python3}" 3<<'INSIDE'
        dir=$1 suite=$2 pkgs=$3
        mount -t tmpfs -o mode=0755,size=2G tmpfs "$dir/build"
        mmdebstrap --variant=minbase --include="$pkgs" \
            --aptopt="Acquire::Languages \"none\"" \
            --dpkgopt="path-exclude=/usr/share/man/*" \
            --dpkgopt="path-exclude=/usr/share/doc/*" \
            --dpkgopt="path-exclude=/usr/share/locale/*" \
            "$suite" "$dir/build/root" >&2
        r=$dir/build/root
        : > "$r/etc/machine-id"; ln -sf /etc/machine-id "$r/var/lib/dbus/machine-id"
        rm -f "$r"/etc/ssh/ssh_host_* "$r/etc/hostname" "$r/etc/resolv.conf"
        : > "$r/etc/resolv.conf"; : > "$r/etc/default/locale"
        mkdir -p "$r/var/log/journal" "$r/opt/fakesys/class"
        for u in apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer dpkg-db-backup.timer fstrim.timer \
                 systemd-timesyncd.service getty.target console-getty.service; do
            ln -sf /dev/null "$r/etc/systemd/system/$u"
        done
        # VERBOSE: the journal then has a line for each session and what it ran, so that tests can count round trips.
        mkdir -p "$r/etc/ssh/sshd_config.d"
        printf "%s\n" "UseDNS no" "GSSAPIAuthentication no" "PasswordAuthentication no" "PermitRootLogin prohibit-password" \
            "MaxStartups 200" "LogLevel VERBOSE" > "$r/etc/ssh/sshd_config.d/lab.conf"
        chroot "$r" useradd -m -u 1000 -s /bin/bash ansible
        echo "ansible ALL=(ALL) NOPASSWD:ALL" > "$r/etc/sudoers.d/ansible"; chmod 440 "$r/etc/sudoers.d/ansible"
        # The real binding for NVML, as its wheel installs it.
        "$4" -m zipfile -e "$dir"/wheel/*.whl "$r/usr/lib/python3/dist-packages"
        # A GPU table that the disk holds is there again after each boot, with no process on any GPU.
        printf "%s\n" "d /run/fake_nvml 0755 root root -" "d /run/fake_nvml/processes 1777 root root -" \
            "C /run/fake_nvml/state 0644 root root - /etc/fake_nvml/state" > "$r/usr/lib/tmpfiles.d/fake_nvml.conf"
        # Fake devices: what the disk holds below /opt/fakesys/{class,bus,devices,module} appears there in /sys (sysfs itself takes no new
        # directory, so a bind mount cannot do it; overlayfs takes sysfs as its lower layer).
        printf "%s\n" "#!/bin/sh -e" "for d in class bus devices module; do" \
            "    [ -n \"\$(ls -A /opt/fakesys/\$d 2>/dev/null)\" ] || continue" \
            "    mount -t overlay fakesys -o ro,lowerdir=/opt/fakesys/\$d:/sys/\$d /sys/\$d" "done" > "$r/usr/local/sbin/fake-sysfs"
        chmod 755 "$r/usr/local/sbin/fake-sysfs"
        printf "%s\n" "[Unit]" "Description=Lay the fake devices of the lab over /sys" "DefaultDependencies=no" \
            "Before=sysinit.target" "After=local-fs-pre.target" "[Service]" "Type=oneshot" "RemainAfterExit=yes" \
            "ExecStart=/usr/local/sbin/fake-sysfs" "[Install]" "WantedBy=sysinit.target" > "$r/etc/systemd/system/fake-sysfs.service"
        mkdir -p "$r/etc/systemd/system/sysinit.target.wants"
        ln -s ../fake-sysfs.service "$r/etc/systemd/system/sysinit.target.wants/"
        cp -a "$r" "$dir/root"
INSIDE
    rmdir "$dir/build"
fi
touch "$dir/ok"
echo "$dir/root"
