"""How an unmodified engine becomes a worker: the sitecustomize bootstrap and the plugin interface."""
