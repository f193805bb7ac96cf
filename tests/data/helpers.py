"""What the record and loader tests share: a small vision tower, and a batch as something to compare."""

from mage_jax.config import VisionConfig

VISION = VisionConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=1,
    mlp_size=32,
    patch_size=16,
    num_channels=3,
    spatial_merge_size=2,
    rope_theta=10_000.0,
    layer_norm_eps=1e-6,
    frame_window_size=4,
)


def sample_ids(batches):
    return [sample_id for batch in batches for row in batch.sample_ids for sample_id in row]


def flat(batch):
    arrays = {**vars(batch.batch.rows), "targets": batch.batch.targets_bt, "weights": batch.batch.weights_bt}
    return {key: value.tobytes() for key, value in arrays.items()} | {
        "ids": batch.sample_ids,
        "used": (batch.tokens_used, batch.patches_used),
    }
