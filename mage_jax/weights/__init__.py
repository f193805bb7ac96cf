"""Hugging Face names, streaming safetensors, weight directories."""
