"""Everything on one host: starts the cache daemon, the server and the engines, watches them, and ends them."""
