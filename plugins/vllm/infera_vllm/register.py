"""Makes the connector known to vLLM by name: its MultiConnector looks children up by name, not by module."""

from __future__ import annotations

from infera_vllm.transfer_config import MODULE, NAME


def register() -> None:
    """vLLM calls this in each of its processes, in some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
