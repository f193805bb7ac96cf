"""Prompt, turn grammar, parser, coordinates, working memory, tokenizer and rendering to tokens with loss spans."""
