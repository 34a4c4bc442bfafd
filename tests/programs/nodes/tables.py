"""Prints the names of the nftables tables of the network namespace, with netlink alone: NFT_MSG_GETTABLE, a dump."""

import socket
import struct

GET_TABLE = 10 << 8 | 1
REQUEST_DUMP = 0x301
DONE = 3
NAME = 1

netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
netlink.bind((0, 0))
netlink.sendall(struct.pack("=IHHII", 20, GET_TABLE, REQUEST_DUMP, 1, 0) + bytes(4))
done = False
while not done:
    data = netlink.recv(1 << 16)
    while data:
        length, kind = struct.unpack_from("=IH", data)
        done = done or kind == DONE
        attributes = data[20:length] if kind != DONE else b""
        while attributes:
            size, name = struct.unpack_from("=HH", attributes)
            if name == NAME:
                print(attributes[4:size].rstrip(b"\0").decode())
            attributes = attributes[(size + 3) & ~3 :]
        data = data[(length + 3) & ~3 :]
