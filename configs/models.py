"""Model sizes. Geometry of the released checkpoint, and a toy that trains on a laptop."""

from mage_jax.config import ModelConfig, TextConfig, VisionConfig


def mage_vl_4b() -> ModelConfig:
    """Mage-VL: 4,741,793,792 parameters (24-layer ViT, 36-layer Qwen3-4B decoder, separate output head)."""
    return ModelConfig(
        vision=VisionConfig(
            hidden_size=1024,
            num_layers=24,
            num_heads=16,
            mlp_size=4096,
            patch_size=16,
            num_channels=3,
            spatial_merge_size=2,
            rope_theta=10_000.0,
            layer_norm_eps=1e-6,
            frame_window_size=4,
        ),
        text=TextConfig(
            hidden_size=2560,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_size=9728,
            vocab_size=151_936,
            rope_theta=5_000_000.0,
            rms_norm_eps=1e-6,
            max_positions=262_144,
        ),
        tied_embeddings=False,
        image_token_id=151_655,
        video_token_id=151_656,
        vision_start_token_id=151_652,
        vision_end_token_id=151_653,
        bos_token_id=151_643,
        eos_token_ids=(151_645,),
    )


def toy() -> ModelConfig:
    """0.9M parameters with the released structure: patch 16, 2x2 merge, GQA, untied head, the shipped toy tokenizer."""
    return ModelConfig(
        vision=VisionConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            mlp_size=256,
            patch_size=16,
            num_channels=3,
            spatial_merge_size=2,
            rope_theta=10_000.0,
            layer_norm_eps=1e-6,
            frame_window_size=4,
        ),
        text=TextConfig(
            hidden_size=128,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_size=384,
            vocab_size=512,
            rope_theta=5_000_000.0,
            rms_norm_eps=1e-6,
            max_positions=32_768,
        ),
        tied_embeddings=False,
        # Ids of the toy tokenizer's control tokens.
        image_token_id=504,
        video_token_id=505,
        vision_start_token_id=502,
        vision_end_token_id=503,
        bos_token_id=499,
        eos_token_ids=(501,),
    )
