"""Configs as data: each file has ``get_config(variant="")`` and imports ``mage_jax.config`` only."""
