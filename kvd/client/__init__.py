"""The client library of kvd, for engine plugins: small, typed, synchronous."""
