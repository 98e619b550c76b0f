"""The protocols between clients and daemon as models whose every interleaving is tried."""
