"""Tools around the servers: environments of engines, overlays, models, checks of a host."""
