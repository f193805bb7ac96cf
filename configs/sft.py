"""Supervised training on your own records: ``configs/sft.py:4b`` (the released model) or ``configs/sft.py:toy``.

Give the data on the command line, and for ``4b`` the weights to start from::

    --config.data.records="('train.jsonl',)" --config.init_from=models/mage-vl
"""

from configs.models import mage_vl_4b, toy
from mage_jax.config import (
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config(variant: str = "4b") -> TrainConfig:
    if variant == "4b":
        return TrainConfig(
            name="sft_4b",
            model=mage_vl_4b(),
            steps=10_000,  # not reported
            data=DataConfig(
                rows=64,  # not reported
                tokens_per_row=32_768,
                patches_per_row=131_072,
                packer="best_fit",
                workers=4,
            ),
            optimizer=OptimizerConfig(),
            compute=ComputeConfig(compute_dtype="bfloat16", remat="full", attention="xla_chunked"),
            mesh=MeshConfig(data=1, fsdp=-1),
            checkpoint=CheckpointConfig(every=500, keep=2),
        )
    if variant == "toy":
        return TrainConfig(
            name="sft_toy",
            model=toy(),
            steps=200,
            data=DataConfig(tokenizer="toy", rows=4, tokens_per_row=512, patches_per_row=560),
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, weight_decay=0.01),  # toy: not reported
            checkpoint=CheckpointConfig(every=100),
        )
    raise ValueError(f"unknown variant {variant!r}; there are '4b' and 'toy'")
