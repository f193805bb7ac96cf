"""The system prompt: a constant of the trained model, kept byte for byte in ``assets/system_prompt.txt``."""

from __future__ import annotations

import os
import pathlib

ASSET = pathlib.Path(__file__).parent / "assets" / "system_prompt.txt"
# A model trained with one prompt is another model under a different one, so a changed byte must be seen.
SYSTEM_PROMPT_SHA256 = "f4ee21e6ad7f3c02a9822f34eec0eb6e5300f3a24f60ae69a90c520ed896587a"


class PromptError(ValueError):
    """A system prompt file is missing, empty or not UTF-8."""


def load_system_prompt(system_prompt_path: str | os.PathLike[str] | None = None) -> str:
    """The system prompt: its file's text less the one newline that ends the file, nothing else changed.

    Args:
      system_prompt_path: a UTF-8 file that replaces the shipped prompt; None loads the shipped one, which is a
        reconstruction (the model card's words, with the tags that its page lost put back).

    Raises:
      PromptError: the file cannot be read, is empty or not UTF-8; it is named.
    """
    path = ASSET if system_prompt_path is None else pathlib.Path(system_prompt_path)
    try:
        text = path.read_bytes().decode("utf-8")  # bytes: read_text would turn \r\n into \n
    except (OSError, ValueError) as error:
        raise PromptError(f"system_prompt_path: {path} cannot be read ({error})") from error
    if not text.strip():
        raise PromptError(f"system_prompt_path: {path} is empty")
    return text.removesuffix("\n")  # ends the file, not the prompt: ``<|im_end|>`` follows the last word
