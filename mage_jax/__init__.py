"""mage_jax: Mage-VL-Cowork, a computer-use agent that sees, clicks and codes, in JAX."""

__version__ = "0.1.0"
