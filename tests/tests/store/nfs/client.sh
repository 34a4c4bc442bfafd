# A client of NFS.
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/sm /var/lib/nfs/sm.bak
mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs
rpcbind
rpc.statd
