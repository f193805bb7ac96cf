"""The quickstart's run: a toy model learns to click on real web pages (85 MiniWoB screenshots), in a few minutes.

Variants: "" (the run), "smoke" (a few steps, for tests).
"""

import dataclasses

from configs.models import toy
from mage_jax.config import CheckpointConfig, DataConfig, ImageConfig, OptimizerConfig, TrainConfig

PAGES = "tests/data/miniwob"


def get_config(variant: str = "") -> TrainConfig:
    config = TrainConfig(
        name="quickstart",
        model=toy(),
        steps=200,
        data=DataConfig(
            records=(f"{PAGES}/train.jsonl",),
            eval_records=(f"{PAGES}/heldout.jsonl",),
            tokenizer="toy",
            rows=4,
            tokens_per_row=512,
            patches_per_row=560,  # four 160x210 screenshots of 140 patches
            image=ImageConfig(),
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, weight_decay=0.01),  # not reported: a toy
        checkpoint=CheckpointConfig(every=100, keep=2),
        log_every=10,
        eval_every=50,
    )
    if variant == "":
        return config
    if variant == "smoke":
        return dataclasses.replace(
            config, name="quickstart_smoke", steps=6, log_every=1, eval_every=3, checkpoint=CheckpointConfig(every=3)
        )
    raise ValueError(f"unknown variant {variant!r}; there are '' and 'smoke'")
