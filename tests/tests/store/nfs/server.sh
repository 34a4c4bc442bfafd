# A server of NFS. What it knows of clients and their locks is on its disk, and outlives the machine.
mkdir -p /srv/disk
mount -o noauto_da_alloc /dev/vda /srv/disk
cd /srv/disk
mkdir -p export state/rpc_pipefs state/sm state/sm.bak state/nfsdcld
touch state/etab state/rmtab
mount --bind state /var/lib/nfs
/run/modprobe nfsd
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs
# In seconds. After a boot, clients claim their locks again in this time.
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
echo 10 > /proc/sys/fs/nfs/nlm_grace_period
rpcbind
nfsdcld
rpc.statd
# fsid=0: the root of NFSv4 would be that of the machine otherwise, which is an overlay.
echo '/srv/disk/export *(rw,sync,no_root_squash,no_subtree_check,fsid=0)' > /etc/exports
exportfs -ra
rpc.mountd
rpc.nfsd 4
sm-notify
