"""`make bench-kvd`: the memory tier against this machine's memcpy and sockets, in the same run."""
