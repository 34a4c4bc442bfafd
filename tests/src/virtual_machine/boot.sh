# The first script in the root: loads modules, and then runs what the host calls. TOOL, PLACE and NETWORK are set before.
exec < /dev/console > /dev/console 2>&1
stty -echo
export TOOL PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$TOOL/bin HOME=/root
mkdir -p /lib/modules
mount --bind "$TOOL/modules" /lib/modules
ln -s "$TOOL/bin/busybox" /run/modprobe
# The kernel loads others by itself.
echo /run/modprobe > /proc/sys/kernel/modprobe
# CRIU does not work without these.
for module in nfnetlink nf_tables tun inet_diag tcp_diag udp_diag raw_diag unix_diag netlink_diag af_packet_diag; do
    /run/modprobe "$module"
done
for module in virtio_blk virtio_net ext4; do
    /run/modprobe "$module"
done
busybox ip link set lo up
if [ -n "$PLACE" ]; then
    busybox hostname "machine$PLACE"
    printf '127.0.0.1 localhost\n%s machine1\n%s machine2\n' "${NETWORK}1" "${NETWORK}2" > /etc/hosts
    busybox ip link set eth0 up
    busybox ip addr add "$NETWORK$PLACE/24" dev eth0
fi
cd /run/host
: > ready
while read -r call; do
    (
        sh "$call.sh" < /dev/null > "$call.said" 2>&1
        echo $? > "$call.unfinished"
        mv "$call.unfinished" "$call.status"
    ) &
done
