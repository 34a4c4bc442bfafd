#!/bin/busybox sh
# PID 1 of a virtual machine, in its initramfs. The machine's root is that of the host, which it cannot change: what it
# writes there goes to memory. It continues with the script `boot` in the directory that it shares with the host.
busybox mount -t devtmpfs devtmpfs /dev
exec < /dev/console > /dev/console 2>&1
set -e
for module in $(busybox cat /modules/order); do
    busybox insmod "/modules/$module"
done
options=trans=virtio,version=9p2000.L,msize=262144
busybox mount -t 9p -o "ro,cache=loose,$options" root /lower
busybox mount -t tmpfs -o mode=0755 tmpfs /upper
busybox mkdir /upper/upper /upper/work
busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work overlay /root
cd /root
for dir in run tmp; do
    busybox mount -t tmpfs -o mode=0755 tmpfs "$dir"
done
busybox chmod 1777 tmp
busybox mount -t proc proc proc
busybox mount -t sysfs sysfs sys
busybox mount -t cgroup2 cgroup2 sys/fs/cgroup
busybox mount -t devtmpfs devtmpfs dev
busybox mkdir -p dev/pts dev/shm run/host
busybox ln -s /proc/self/fd dev/fd
busybox mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts dev/pts
busybox mount -t tmpfs -o mode=1777 tmpfs dev/shm
busybox mount -t 9p -o "$options" host run/host
exec busybox switch_root /root /bin/sh /run/host/boot
