"""ViT, merger, Qwen3 decoder, KV cache, prefill and decode."""
