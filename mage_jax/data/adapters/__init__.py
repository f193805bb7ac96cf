"""Adapters: public data formats to ``Episode``, one module per source, listed here."""

from __future__ import annotations

from mage_jax.data.adapters import agentnet, grounding, openai, openhands, osworld, own, scalecua, sharegpt, sweagent
from mage_jax.data.adapters.base import Adapter

ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        openai.ADAPTER,
        sharegpt.ADAPTER,
        agentnet.ADAPTER,
        scalecua.ADAPTER,
        grounding.OSATLAS,
        grounding.SCREENSPOT,
        openhands.ADAPTER,
        sweagent.ADAPTER,
        own.ADAPTER,
        osworld.ADAPTER,
    )
}
