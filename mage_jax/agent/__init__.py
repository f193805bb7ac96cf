"""Prompt, tokenizer and rendering to tokens with loss spans."""
